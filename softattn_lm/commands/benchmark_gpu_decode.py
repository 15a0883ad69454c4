"""Of `benchmark gpu`: tokens per second of a text, beside what reading its weights and its whole cache allows.

One token of GPT-2 124M takes so little reading, 70 microseconds of an H200, that it is kernels one behind the other
that cost: how many there are decides.
"""

from __future__ import annotations

import shutil
from functools import partial

import torch

from softattn_lm.commands.agreement import step_agrees, tokens_of, wait
from softattn_lm.commands.bare_training import Shape, gpt2_style
from softattn_lm.commands.comparison import Row, interleaved, seconds_of
from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.graphed import GraphedDecode

NEW, TINY_NEW = 512, 8  # tokens written, behind a prompt of PROMPT
PROMPT = 16
CHECKED = 16  # tokens, of which a compiled step is held against the model
OF_BANDWIDTH = 0.5  # aimed at
LIMIT, PLAIN = "limit of bandwidth", "plain graph"


def decode(shape: Shape, device: torch.device, repeats: int) -> list[Row]:
    """The compiled step beside the plain one, which stands alone where nothing can be compiled."""
    cuda = device.type == "cuda"
    model = gpt2_style(shape).eval().to(device, torch.bfloat16 if cuda else torch.float32)
    plain, compiled = GraphedDecode(model), compiled_writer(model)
    writers = {PLAIN: plain} if compiled is None else {"ours": compiled, PLAIN: plain}
    rows = []
    if compiled is not None:
        tokens = tokens_of(shape, 1, device)[:, :CHECKED]
        rows.append(step_agrees("compiled graphed decoding, beside the model", compiled, tokens))
    new = NEW if cuda else TINY_NEW
    rates = interleaved({name: partial(rate, writer, new, device) for name, writer in writers.items()}, repeats)
    limit = bandwidth(device) / bytes_of_a_step(plain)
    others = {LIMIT: [limit] * repeats}
    if compiled is None:
        return [Row("decode, batch 1, not compiled", "tokens/s", rates[PLAIN], others, LIMIT, OF_BANDWIDTH, limit)]
    others[PLAIN] = rates[PLAIN]
    return [*rows, Row("decode, batch 1", "tokens/s", rates["ours"], others, LIMIT, OF_BANDWIDTH, limit)]


def compiled_writer(model: DecoderLM) -> GraphedDecode | None:
    """None, and a line that says why, where that is no use."""
    made: list[GraphedDecode] = []

    def make() -> None:
        made.append(GraphedDecode(model, compiled=True))
        made[0].write(torch.zeros(1, 1, dtype=torch.long, device=made[0].device), 1)  # a CPU compiles at the first step

    if model.embed.weight.device.type == "cpu" and shutil.which("g++") is None:
        print("g++ is not installed: the compiled decode step is left out", flush=True)
        return None
    try:
        print(f"compiling the decode step took {seconds_of(make):.0f} s", flush=True)
    except RuntimeError as error:
        print(f"the decode step does not compile: {' '.join(str(error).split())[:300]}", flush=True)
        return None
    return made[0]


def rate(writer: GraphedDecode, new: int, device: torch.device) -> float:
    """Tokens per second, those of the prompt included, which are read one by one as well."""
    prompt = torch.ones(1, PROMPT, dtype=torch.long, device=device)

    def write() -> None:
        writer.write(prompt, new)
        wait(device)

    return (PROMPT + new - 1) / seconds_of(write)


def bytes_of_a_step(writer: GraphedDecode) -> int:
    """All weights but a table of positions, and the whole cache, as a step of fixed shapes reads it."""
    model = writer.model
    position = sum(p.numel() for p in model.positions.parameters())
    weights = (sum(p.numel() for p in model.parameters()) - position) * model.embed.weight.element_size()
    return weights + sum(rows.numel() * rows.element_size() for layer in writer.cache for rows in layer)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading a long tensor; the best of some rounds."""
    values = torch.ones(2**30 if device.type == "cuda" else 2**22, device=device)

    def read() -> None:
        values.sum()
        wait(device)

    read()
    return values.numel() * 4 / min(seconds_of(read) for _ in range(7))
