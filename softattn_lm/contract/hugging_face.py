"""The contract for a Hugging Face model or attention function: the same properties, measured on logits.

A function is registered as its user would register it, with AttentionInterface alone, unless its file does more: for an
implementation that has no entry in ALL_MASK_ATTENTION_FUNCTIONS, transformers makes no mask and hands over None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from softattn_lm.config.custom import blamed
from softattn_lm.contract.cost import Cost, Step, costs
from softattn_lm.contract.foreign import parameters_of
from softattn_lm.contract.hf_properties import MEASURES, HFSubject, gradients_of, logits_of
from softattn_lm.contract.property import PROPERTIES
from softattn_lm.errors import UserError

NAME = "checked_by_softattn"
NO_MASK = (
    "transformers makes no mask for this name, and attention_mask arrives as None; in the same file register one "
    "too, such as AttentionMaskInterface.register(name, eager_mask), or hide the future inside the function"
)
WHOLE = "a whole model is on trial, and this concerns its attention by itself"

_NOT_OURS = dict.fromkeys(("dropout_is_for_training", "scales_are_honoured"), "its model is not of our making")


def like_hf(name: str, found: Any, same_as_eager: bool) -> HFSubject:
    """found: an attention function (module, query, key, value, attention_mask, ...), a model, or a maker of one.

    Raises UserError for anything else, and where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        raise UserError("--like hf needs the package transformers; type: pip install transformers") from None
    untried = {property: WHOLE for property in PROPERTIES if property not in MEASURES}
    if isinstance(found, PreTrainedModel):
        untried |= _NOT_OURS
        return HFSubject(name, lambda **_: copy.deepcopy(found).eval(), False, same_as_eager, untried)
    parameters = parameters_of(found) if callable(found) else None
    if parameters is None:
        raise _no_subject(name)
    if "query" in [parameter.name for parameter in parameters] or len(parameters) >= 5:
        registered = [key for key, value in ALL_ATTENTION_FUNCTIONS.items() if value is found]
        if not registered:
            AttentionInterface.register(NAME, found)
        implementation = registered[0] if registered else NAME
        hint = "" if implementation in ALL_MASK_ATTENTION_FUNCTIONS else NO_MASK
        return HFSubject(name, lambda **config: llama(implementation, **config), True, same_as_eager, untried, hint)
    if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        untried |= _NOT_OURS
        with blamed(f"--like hf {name}", name):
            made = _seeded(found)
        if not isinstance(made, torch.nn.Module):
            raise UserError(f"--like hf {name}: it makes a {type(made).__name__}, and no model")
        return HFSubject(name, lambda **_: _seeded(found).eval(), False, same_as_eager, untried)
    raise _no_subject(name)


def _no_subject(name: str) -> UserError:
    return UserError(
        f"--like hf {name}: that is no attention function (module, query, key, value, attention_mask, ...), no model "
        "and no function without arguments that makes one"
    )


def llama(implementation: str, **config: Any) -> Any:
    """2 layers, 4 heads in 2 groups, 32 components, 64 symbols; weights large enough for attention to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}
    given = LlamaConfig(**sizes, **config)
    given._attn_implementation = implementation
    return _seeded(lambda: LlamaForCausalLM(given)).eval()


def _seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def model_costs(subject: HFSubject) -> list[Cost]:
    """Of the whole model, beside the same weights with transformers' own eager and sdpa attention."""

    def step_of(implementation: str | None) -> Callable[[int], Step]:
        def at(length: int) -> Step:
            model = subject.make()
            if implementation is not None:
                model.set_attn_implementation(implementation)
            length = min(length, model.config.max_position_embeddings)
            idx = subject.text(1, length)

            def step() -> None:
                gradients_of(model, logits_of(model, idx))

            return step

        return at

    return costs(step_of(None), {"eager": step_of("eager"), "sdpa": step_of("sdpa")})
