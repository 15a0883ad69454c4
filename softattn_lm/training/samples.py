"""Text the model writes while it learns: shown, and kept in samples.txt. Draws from a generator of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.text import Text

from softattn_lm.model.decoder import DecoderLM
from softattn_lm.model.generate import generate
from softattn_lm.runs.files import replace_text
from softattn_lm.tokenizer.base import Tokenizer
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.metrics import Clock

PROMPT_TOKENS = 32
NEW_TOKENS = 240
TEMPERATURE = 0.8


HEADING = re.compile(r"^--- step (\d+), temperature [\d.]+ ---$", re.MULTILINE)


def cut_samples(folder: Path, step: int) -> None:
    """Drop the samples past `step`, which a continued run is going to write again, as `cut_metrics` does with rows."""
    path = folder / "samples.txt"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    past = next((found.start() for found in HEADING.finditer(text) if int(found[1]) > step), None)
    if past is not None:
        replace_text(path, text[:past])


def has_sample(folder: Path, step: int) -> bool:
    path = folder / "samples.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return any(int(found[1]) == step for found in HEADING.finditer(text))


def continued(model: DecoderLM, tokenizer: Tokenizer, opening: list[int], seed: int) -> tuple[str, str]:
    """The prompt that `opening` begins with, and the whole text."""
    prompt = opening[: max(1, min(PROMPT_TOKENS, model.context // 2))]
    chosen = generate(model, prompt, max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, seed=seed)
    return tokenizer.decode(prompt), tokenizer.decode(prompt + [step[0] for step in chosen])


def append_sample(folder: Path, step: int, text: str) -> None:
    with (folder / "samples.txt").open("a", encoding="utf-8") as file:
        file.write(f"--- step {step}, temperature {TEMPERATURE} ---\n{text}\n\n")


class Samples(Callback):
    """Continues the opening of the validation split every `every` steps, and after the last one; 0 is at the end
    only. Before the checkpoint of the same step, so that whoever goes on from that has the sample already.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        clock: Clock,
        tokenizer: Tokenizer,
        opening: list[int],
        *,
        every: int,
        seed: int,
        unfinished: Callable[[], bool],
    ) -> None:
        self.folder, self.console, self.clock, self.tokenizer = folder, console, clock, tokenizer
        self.opening, self.every, self.seed, self.unfinished = opening, every, seed, unfinished
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        step = trainer.global_step
        due = self.every and step % self.every == 0 and step < pl_module.steps
        if step != self._last and due:
            self.write(trainer, pl_module)
        self._last = step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that was interrupted before its last validation comes here again."""
        assert isinstance(pl_module, LitGPT)
        if trainer.global_step == pl_module.steps and not self.unfinished():
            self.write(trainer, pl_module)

    def write(self, trainer: Trainer, module: LitGPT) -> None:
        """Divided parameters (FSDP) are gathered by all ranks together, so then all of them sample; one writes."""
        if not trainer.is_global_zero and not isinstance(trainer.strategy, ModelParallelStrategy):
            return
        with self.clock.paused():
            prompt, text = continued(module.model, self.tokenizer, self.opening, self.seed)
            if trainer.is_global_zero:
                self._show(trainer.global_step, prompt, text)

    def _show(self, step: int, prompt: str, text: str) -> None:
        append_sample(self.folder, step, text)
        shown = Text(text)
        if text.startswith(prompt):
            shown.stylize("dim", 0, len(prompt))
        self.console.rule(f"sample at step {step}", style="dim")
        self.console.print(shown)
        self.console.rule(style="dim")
