"""Of `benchmark gpu`: tokens per second of a text, beside what reading allows: all weights for every token, and what
the cache holds of those before it.

A step of fixed shapes reads the whole cache, of which the first tokens need nothing; so much it loses by its shapes.
One token of GPT-2 124M takes so little reading, 60 microseconds of an H200, that it is kernels one behind the other
that cost: how many there are decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from softattn_lm.commands.agreement import LeftOut, step_agrees, tokens_of, wait
from softattn_lm.commands.bare_training import Shape, gpt2_style
from softattn_lm.commands.comparison import Row, interleaved, no_compiler, seconds_of
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.graphed import GraphedDecode

NEW, TINY_NEW = 512, 8  # tokens written, behind a prompt of PROMPT
PROMPT = 16
CHECKED = 16  # tokens, of which a compiled step is held against the model
OF_BANDWIDTH = 0.5  # aimed at
LIMIT, PLAIN = "limit of reading weights and what the cache holds", "plain graph"


def decode(shape: Shape, device: torch.device, repeats: int) -> Iterator[Row]:
    """The compiled step beside the plain one. Where it cannot be compiled the plain one stands alone, and behind its
    row comes a RuntimeError.
    """
    cuda = device.type == "cuda"
    model = gpt2_style(shape).eval().to(device, torch.bfloat16 if cuda else torch.float32)
    plain, new = GraphedDecode(model), NEW if cuda else TINY_NEW
    limit = bandwidth(device) / bytes_of_a_step(plain, PROMPT + new - 1)
    others = {LIMIT: [limit] * repeats}

    def rates(**writers: GraphedDecode) -> dict[str, list[float]]:
        return interleaved({name: partial(rate, writer, new, device) for name, writer in writers.items()}, repeats)

    try:
        compiled = compiled_writer(model)
    except RuntimeError:
        ours = rates(ours=plain)["ours"]
        yield Row("decode, batch 1, not compiled", "tokens/s", ours, others, LIMIT, OF_BANDWIDTH, limit)
        raise
    tokens = tokens_of(shape, 1, device)[:, :CHECKED]
    yield step_agrees("compiled graphed decoding, beside the model", compiled, tokens)
    found = rates(ours=compiled, plain=plain)
    others[PLAIN] = found["plain"]
    yield Row("decode, batch 1", "tokens/s", found["ours"], others, LIMIT, OF_BANDWIDTH, limit)


def compiled_writer(model: DecoderLM) -> GraphedDecode:
    """Raises RuntimeError for what does not compile, which is LeftOut where there is nothing to compile with."""
    made: list[GraphedDecode] = []

    def make() -> None:
        made.append(GraphedDecode(model, compiled=True))
        made[0].write(torch.zeros(1, 1, dtype=torch.long, device=made[0].device), 1)  # a CPU compiles at the first step

    try:
        seconds = seconds_of(make)
    except RuntimeError as error:
        if model.embed.weight.device.type == "cpu" and no_compiler(error):
            raise LeftOut("the compiled decode step is left out, as no C++ compiler works here") from error
        raise
    print(f"compiling the decode step took {seconds:.0f} s", flush=True)
    return made[0]


def rate(writer: GraphedDecode, new: int, device: torch.device) -> float:
    """Tokens per second, those of the prompt included, which are read one by one as well."""
    prompt = torch.ones(1, PROMPT, dtype=torch.long, device=device)

    def write() -> None:
        writer.write(prompt, new)
        wait(device)

    return (PROMPT + new - 1) / seconds_of(write)


def bytes_of_a_step(writer: GraphedDecode, steps: int) -> float:
    """What has to be read, the mean of so many steps: all weights but a table of positions, and keys and values of the
    tokens before, none in the first step.
    """
    model = writer.model
    position = sum(p.numel() for p in model.positions.parameters())
    weights = (sum(p.numel() for p in model.parameters()) - position) * model.embed.weight.element_size()
    cache = sum(rows.numel() * rows.element_size() for layer in writer.cache for rows in layer)
    return weights + cache * (steps - 1) / 2 / model.context


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading a long tensor; the best of some rounds."""
    values = torch.ones(2**30 if device.type == "cuda" else 2**22, device=device)

    def read() -> None:
        values.sum()
        wait(device)

    read()
    return values.numel() * 4 / min(seconds_of(read) for _ in range(7))
