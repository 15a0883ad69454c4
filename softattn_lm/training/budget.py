"""How long a run is: one of steps, tokens and epochs, turned into optimizer steps. Plain Python."""

from __future__ import annotations

import math
from typing import Any

from softattn_lm.errors import UserError


def max_steps(config: dict[str, Any], train_tokens: int) -> int:
    """Optimizer steps of the budget in `config`; `train_tokens` is the length of the training split.

    tokens: the last step may go over, by less than one batch. epochs: a passage through all training tokens, rounded up
    likewise. Raises UserError for no budget, for two, and for one of less than a step.
    """
    given = {key: config[key] for key in ("steps", "tokens", "epochs") if config.get(key) is not None}
    if len(given) != 1:
        said = " and ".join(f"{key}={value}" for key, value in given.items()) or "none"
        raise UserError(
            f"a run has one budget, steps=, tokens= or epochs=, and {said} was given; type for example steps=1000"
        )
    ((key, value),) = given.items()
    if key == "epochs" and train_tokens == 0:
        raise UserError("this task is fresh in every step and has no epochs; type steps= or tokens= instead of epochs=")
    per_step = config["batch_size"] * config["model"]["context"]
    if key == "steps":
        steps = int(value)
        if steps < 1:
            raise UserError(f"steps={value} comes to no training step at all; type steps=1 or more")
        return steps
    tokens = value if key == "tokens" else round(value * train_tokens, 6)
    if tokens < per_step:
        least = per_step if key == "tokens" else f"{math.ceil(100 * per_step / train_tokens) / 100:g}"
        raise UserError(
            f"{key}={value} is {tokens:.0f} tokens, less than one training step of {per_step} tokens "
            f"(batch_size={config['batch_size']} × model.context={config['model']['context']}); "
            f"type {key}={least} or more"
        )
    return math.ceil(tokens / per_step)


def said_budget(config: dict[str, Any], steps: int) -> str:
    """The budget as it was typed, and what it comes to where that is another number."""
    key = next(key for key in ("steps", "tokens", "epochs") if config.get(key) is not None)
    return f"steps={steps}" if key == "steps" else f"{key}={config[key]} ({steps} steps)"
