"""Write text with a trained model: a prompt, from the command line, a file or standard input, and what comes after
it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from softattn_lm.config.settings import SampleSettings, section
from softattn_lm.errors import UserError, visible
from softattn_lm.runs.find import find_run


def run(cfg: dict[str, Any], words: list[str], after_dashes: str | None = None) -> None:
    """words: a prompt, a run, or both in any order; `after_dashes`: the prompt, if `--` marked it as nothing else.

    Prints the prompt and exactly max_new_tokens tokens behind it.
    """
    settings = section(SampleSettings, cfg)
    run_name, prompt = sort_words(words, settings, after_dashes)
    folder = find_run(run_name, settings.runs)

    from softattn_lm.evaluation.device import pick_device
    from softattn_lm.model.generate import check_sampling, generate, in_bfloat16
    from softattn_lm.training.checkpoint import load_run

    sampling = {
        name: getattr(settings, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "n")
    }
    check_sampling(**sampling)
    device = pick_device(settings.device)
    if settings.graph and not device.startswith("cuda"):
        raise UserError(f"graph=true needs a CUDA device, and this is {device}; type graph=false")
    loaded = load_run(folder, settings.checkpoint, device)
    ids = [int(token) for token in loaded.tokenizer.encode(prompt)]
    if not ids:
        raise UserError("the prompt is empty; give at least one token, for example a line break")
    print(
        f"{visible(str(folder))}, step {loaded.step}: {len(ids)} tokens of prompt, {settings.max_new_tokens} to write",
        file=sys.stderr,
    )
    model = in_bfloat16(loaded.model) if settings.precision == "bfloat16" else loaded.model
    steps = generate(model, ids, **sampling, seed=settings.seed, use_cache=settings.cache, graph=settings.graph)
    if settings.n == 1:
        _stream(prompt, loaded.tokenizer.stream(), steps)
        return
    samples = zip(*steps, strict=True)
    for number, sample in enumerate(samples, 1):
        print(f"--- sample {number} of {settings.n} ---", file=sys.stderr)
        print(shown(prompt + loaded.tokenizer.decode(sample)), flush=True)


def _stream(prompt: str, stream: Any, steps: Any) -> None:
    """Written as it comes, whole characters at a time."""
    print(shown(prompt), end="", flush=True)
    for (token,) in steps:
        print(shown(stream.push(token)), end="", flush=True)
    print(shown(stream.flush()))


def sort_words(words: list[str], settings: SampleSettings, after_dashes: str | None = None) -> tuple[str | None, str]:
    """(run or None for the newest, prompt). A word is a run if a run is called exactly so, and beside a prompt that
    stood behind `--` any word is. Raises UserError for more words.
    """
    n_words = len(words) + (after_dashes is not None)
    if n_words > 2:
        raise UserError(f"sample takes a prompt and a run, and got {n_words} words; put the prompt in quotes")
    if after_dashes is not None:
        chosen, prompts = words[0] if words else None, [after_dashes]
    else:
        chosen, prompts = _run_and_prompts(words, settings)
    if settings.file is None:
        return chosen, prompts[0] if prompts else "\n"
    if prompts:
        raise UserError(f"the prompt was given twice, as {prompts[0]!r} and as file={settings.file}; leave one out")
    return chosen, _read(settings.file)


def _run_and_prompts(words: list[str], settings: SampleSettings) -> tuple[str | None, list[str]]:
    named = [word for word in words if _is_run(word, settings.runs)]
    if len(words) == 2 and not named:
        find_run(words[1], settings.runs)  # a beginning of a name, or the error that names the nearest
        named = [words[1]]
    chosen = named[-1] if named else None
    prompts = list(words)
    if chosen is not None:
        del prompts[len(words) - 1 - words[::-1].index(chosen)]
    return chosen, prompts


def _is_run(word: str, runs: str) -> bool:
    if not word or "\0" in word or len(word) > 200:
        return False
    try:
        return any(
            (folder / "config.yaml").is_file() for folder in (Path(word).expanduser(), Path(runs).expanduser() / word)
        )
    except (OSError, RuntimeError):  # a prompt can be anything, and a path can not
        return False


def _read(file: str) -> str:
    """The text of a file, or of standard input for `-`, as strict UTF-8."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(
            f"file={file} cannot be read: {error.strerror}; give a text file, or - for standard input; "
            "a prompt goes after --"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"file={file} is not UTF-8: byte {error.start} is {data[error.start]:#04x}; save it as UTF-8"
        ) from None


def shown(text: str) -> str:
    """On a terminal, control characters are spelled out: a model or a prompt must not move the cursor. Raw in a
    pipe.
    """
    return visible(text) if sys.stdout.isatty() else text
