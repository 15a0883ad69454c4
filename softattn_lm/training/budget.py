"""How long a run is: one of steps, tokens and epochs, turned into optimizer steps. Plain Python."""

from __future__ import annotations

import math
from typing import Any

from softattn_lm.errors import UserError


def max_steps(config: dict[str, Any], train_tokens: int) -> int:
    """Optimizer steps of the budget in `config`; `train_tokens` is the length of the training split.

    tokens: the last step may go over, by less than one batch. epochs: a passage through all training tokens, rounded up
    likewise. Raises UserError for no budget, for two, and for one that comes to nothing.
    """
    given = {key: config[key] for key in ("steps", "tokens", "epochs") if config.get(key) is not None}
    if len(given) != 1:
        said = " and ".join(f"{key}={value}" for key, value in given.items()) or "none"
        raise UserError(
            f"a run has one budget, steps=, tokens= or epochs=, and {said} was given; type for example steps=1000"
        )
    ((key, value),) = given.items()
    per_step = config["batch_size"] * config["model"]["context"]
    if key == "steps":
        steps = int(value)
    elif key == "tokens":
        steps = math.ceil(value / per_step)
    else:
        steps = math.ceil(value * train_tokens / per_step)
    if steps < 1:
        raise UserError(f"{key}={value} comes to no training step at all; type {key} larger than 0")
    return steps
