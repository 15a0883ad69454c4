"""How the models of peers.py write: each by its own library's function, greedily, with a cache.

A call continues `prompt` (B, T) by `new` tokens, and is an error if it made another number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.comparison import Report
from softattn_lm.commands.peers import leave_uncompiled, left_out, litgpt_llama, x_transformers_gpt2
from softattn_lm.model.decode import one_thread

Writer = Callable[[], None]
STATIC = "transformers, static cache"
COMPILED = f"{STATIC}, compiled"


def transformers_writers(model: Any, prompt: Tensor, new: int, report: Report) -> dict[str, Writer]:
    """Its generate, greedy: with the cache that grows, and with the static one, its step compiled where that succeeds;
    `report` says where it did not, and then it is not tried again.
    """
    write = transformers_writer(model, prompt, new)
    if COMPILED not in report.found["left_out"]:
        try:
            compiled = partial(write, cache_implementation="static", compile_config=_compiled())
            compiled()
            return {"transformers": write, COMPILED: compiled}
        except RuntimeError as error:
            leave_uncompiled(report, COMPILED, error)
    return {"transformers": write, STATIC: partial(write, cache_implementation="static")}


def transformers_writer(model: Any, prompt: Tensor, new: int) -> Callable[..., None]:
    """Takes what else its generate is given."""
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    model.eval()

    def write(**more: Any) -> None:
        ids = model.generate(prompt, use_cache=True, **given, **more)
        assert ids.shape == (len(prompt), prompt.shape[1] + new), ids.shape

    return write


def _compiled() -> Any:
    from transformers import CompileConfig

    compiled = CompileConfig(fullgraph=False, mode="default", dynamic=False)
    compiled._compile_all_devices = True  # type: ignore[assignment]  # elsewhere than on a GPU it has to be asked for twice
    return compiled


def in_one_thread(write: Callable[[], object]) -> Writer:
    """As ours writes where a step is small: other threads would be waited for longer than they help."""

    def alone() -> None:
        with one_thread():
            write()

    return alone


def other_writers(shape: Shape, prompt: Tensor, new: int, llama: bool = False) -> dict[str, Writer]:
    """The optional ones of that style that are there, greedy, with their caches, after one prompt (1, T)."""
    builders = {"litgpt": litgpt_writer} if llama else {"x-transformers": x_transformers_writer}
    return {name: build(shape, prompt, new) for name, build in builders.items() if name not in left_out()}


def litgpt_writer(shape: Shape, prompt: Tensor, new: int) -> Writer:
    """The cache is made once and emptied behind every text, as its own command does."""
    from litgpt.generate.base import generate

    model, end = litgpt_llama(shape).eval(), prompt.shape[1] + new
    model.max_seq_length = end
    model.set_kv_cache(batch_size=1)

    def write() -> None:
        ids = generate(model, prompt[0], end, temperature=0.0, include_prompt=False)
        assert ids.shape == (new,), ids.shape
        for block in model.transformer.h:
            block.attn.kv_cache.reset_parameters()

    return write


def x_transformers_writer(shape: Shape, prompt: Tensor, new: int) -> Writer:
    from x_transformers import AutoregressiveWrapper

    model = AutoregressiveWrapper(x_transformers_gpt2(shape)).eval()

    def write() -> None:
        ids = model.generate(prompt, new, temperature=0.0, cache_kv=True)
        assert ids.shape == (1, new), ids.shape

    return write
