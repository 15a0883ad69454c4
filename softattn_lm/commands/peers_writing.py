"""How the models of peers.py write: each by its own library's function, greedily, with a cache.

A call continues `prompt` (B, T) by `new` tokens, and is an error if it made another number of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softattn_lm.commands.bare_training import Shape
from softattn_lm.commands.peers import left_out, litgpt_gpt2, x_transformers_gpt2

Writer = Callable[[], None]


def transformers_writers(model: Any, prompt: Tensor, new: int) -> dict[str, Writer]:
    """Its generate, greedy: with the cache that grows, and with the static one and its compiled step."""
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    model.eval()

    def write(**more: Any) -> None:
        ids = model.generate(prompt, use_cache=True, **given, **more)
        assert ids.shape == (len(prompt), prompt.shape[1] + new), ids.shape

    return {"transformers": write, "transformers, static": lambda: write(**_static_cache())}


def _static_cache() -> dict[str, Any]:
    """transformers' static cache, with its compiled step where there is a C++ compiler."""
    from transformers import CompileConfig

    if shutil.which("g++") is None:
        return {"cache_implementation": "static"}
    compiled = CompileConfig(fullgraph=False, mode="default", dynamic=False)
    compiled._compile_all_devices = True  # type: ignore[assignment]  # elsewhere than on a GPU it has to be asked for twice
    return {"cache_implementation": "static", "compile_config": compiled}


def other_writers(shape: Shape, prompt: Tensor, new: int) -> dict[str, Writer]:
    """The optional ones that are there, greedy, with their caches, after one prompt (1, T)."""
    builders = {"litgpt": litgpt_writer, "x-transformers": x_transformers_writer}
    return {name: build(shape, prompt, new) for name, build in builders.items() if name not in left_out()}


def litgpt_writer(shape: Shape, prompt: Tensor, new: int) -> Writer:
    """The cache is made once and emptied behind every text, as its own command does."""
    from litgpt.generate.base import generate

    model, end = litgpt_gpt2(shape).eval(), prompt.shape[1] + new
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
