"""When checkpoints are saved, and what makes each of them describe a whole optimizer step.

    last   after every validation, or every `save_every` steps, and at the end
    best   the validated step with the lowest loss on the first validation set
    step-00001000   the steps in `keep_steps`; "log": 1, 2, 4, 8, ...

Where several fall together the file is written once and linked, `last` first: it is never older than another.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer

from softattn_lm.training.checkpoint import FORMAT
from softattn_lm.training.lit import LitGPT
from softattn_lm.training.metrics import Clock, Metrics


class Checkpoints(Callback):
    """`contents`: the entries of "softattn" that never change in a run: config, tokenizer, versions, data.

    A step that is validated is saved after it, so that what a run is continued from has been validated already. Where
    an interrupt left no time for that, "unvalidated" is true, and a continued run begins with the validation.
    """

    def __init__(
        self,
        folder: Path,
        metrics: Metrics,
        clock: Clock,
        contents: dict[str, Any],
        *,
        accumulate: int,
        val_every: int,
        save_every: int,
        keep_steps: list[int] | Literal["log"],
        validates: bool = True,
    ) -> None:
        self.folder = folder / "checkpoints"
        self.metrics, self.clock, self.contents = metrics, clock, contents
        self.accumulate, self.val_every, self.save_every, self.keep_steps = (
            accumulate,
            val_every,
            save_every,
            keep_steps,
        )
        self.validates = validates
        self.best: dict[str, float] = {}  # {"loss", "step"}
        self.latest: dict[str, float] = {}  # of the first validation set
        self._considered = -1
        self.unvalidated = False

    def validated(self, step: int, steps: int) -> bool:
        """Whether Lightning is going to validate after this step."""
        return self.validates and (step == steps or step % self.val_every == 0)

    def _kept(self, step: int) -> bool:
        return kept(step, self.keep_steps)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._considered = trainer.global_step
        if trainer.global_step == 0 and self._kept(0):
            self.save(trainer, [step_name(0)])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LitGPT)
        step = trainer.global_step
        if step == self._considered:
            return
        self._considered = step
        if step == pl_module.steps:
            # Lightning validates after the last step only where the interval says so, and whenever it is asked to stop.
            trainer.should_stop = True
        if self.validated(step, pl_module.steps):
            return  # saved after the validation
        names = [step_name(step)] if self._kept(step) else []
        if step % (self.save_every or self.val_every) == 0 or step == pl_module.steps:
            names.insert(0, "last")
        if names:
            self.save(trainer, names)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        if pl_module.validation_cut:
            return
        step = trainer.global_step
        if step == pl_module.steps:
            trainer.should_stop = True  # a continued run may have had nothing but this validation to do
        first = next(iter(pl_module.validation.values()))
        self.latest = {"loss": first.nats_per_token, "loss_se": first.standard_error, "step": step}
        if first.bits_per_byte is not None:
            self.latest["bits_per_byte"] = first.bits_per_byte
        names = []
        if step % (self.save_every or self.val_every) == 0 or step == pl_module.steps:
            names.append("last")
        if math.isfinite(first.nats_per_token) and first.nats_per_token < self.best.get("loss", math.inf):
            self.best = {"loss": first.nats_per_token, "step": step}
            # `last` is never older than `best`: a continued run must know of it.
            names = ["last", "best"]
        if self._kept(step):
            names.append(step_name(step))
        if names:
            self.save(trainer, names)

    def save(self, trainer: Trainer, names: list[str], unvalidated: bool = False) -> None:
        """One file under several names; all ranks must come here together."""
        self.unvalidated = unvalidated
        with self.clock.paused():
            self.metrics.flush(trainer)
            self.metrics.make_durable(trainer)
            paths = [self.folder / f"{name}.ckpt" for name in names]
            trainer.save_checkpoint(paths[0])
            if trainer.is_global_zero:
                for path in paths[1:]:
                    _link(paths[0], path)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        step = trainer.global_step
        assert isinstance(pl_module, LitGPT)
        fit_loop = checkpoint["loops"]["fit_loop"]
        checkpoint["loops"] = {"fit_loop": whole_step(fit_loop, step, self.accumulate, self.unvalidated)}
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            states = zip(checkpoint["optimizer_states"], trainer.optimizers, strict=True)
            checkpoint["optimizer_states"] = [
                in_model_order(state, optimizer, pl_module) for state, optimizer in states
            ]
        checkpoint["softattn"] = {
            "format": FORMAT,
            **self.contents,
            "step": step,
            "metrics": self.latest,
            "best": self.best,
            "seconds": self.clock.seconds,
            "skipped": pl_module.skipped,
            "unvalidated": self.unvalidated,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert isinstance(pl_module, LitGPT)
        saved = checkpoint["softattn"]
        self.latest, self.best, pl_module.skipped = saved["metrics"], saved["best"], saved.get("skipped", 0)


def kept(step: int, keep_steps: list[int] | Literal["log"]) -> bool:
    if keep_steps == "log":
        return step > 0 and step & (step - 1) == 0
    return step in keep_steps


def complete_names(folder: Path, own: dict[str, Any], keep_steps: list[int] | Literal["log"]) -> None:
    """Make the names that a process killed behind writing `last` did not come to. `own`: "softattn" of `last`."""
    step = own["step"]
    last, best, name = (folder / "checkpoints" / f"{each}.ckpt" for each in ("last", "best", step_name(step)))
    if own["best"].get("step") == step and not (best.is_file() and best.samefile(last)):
        _link(last, best)
    if kept(step, keep_steps) and not name.is_file():
        _link(last, name)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def in_model_order(state: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state_dict with parameters numbered as in `module.parameters()`, not group by group.

    That is how Lightning saves it under FSDP and expects to read it there, so a run can go on under another strategy;
    an ordinary `load_state_dict` goes by position within the groups and takes any numbers.
    """
    place = {id(parameter): index for index, parameter in enumerate(module.parameters())}
    numbers = [place[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [group | {"params": [numbers[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbers[i]: value for i, value in state["state"].items()}, "param_groups": groups}


def whole_step(fit_loop: dict[str, Any], step: int, accumulate: int, unvalidated: bool = False) -> dict[str, Any]:
    """Lightning's loop state, rewritten to say: `step` optimizer steps are done, and nothing has been begun after them,
    or if `unvalidated`, a validation at its first batch: Lightning then goes on with that.

    Lightning saves wherever it happens to be, inside a hook that has counted the micro-batch as begun and not as done,
    or within a validation, and takes up its loops in the middle of that. The keys are those of lightning 2.6, and a key
    that is gone stops the first save, not the first resume.
    """

    def counters(done: int) -> dict[str, int]:
        return {"ready": done, "completed": done, "started": done, "processed": done}

    def validation(progress: dict[str, Any]) -> dict[str, Any]:
        begun = {"ready": int(unvalidated), "started": int(unvalidated), "processed": 0, "completed": 0}
        return {key: begun if isinstance(value, dict) else False for key, value in progress.items()}

    state = dict(fit_loop)
    # One epoch, the whole run, has begun and has not ended.
    begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    replacements = {
        "epoch_progress": {"total": begun, "current": begun},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {
            "total": counters(step * accumulate),
            "current": counters(step * accumulate),
            "is_last_batch": False,
        },
        "epoch_loop.val_loop.batch_progress": validation(state["epoch_loop.val_loop.batch_progress"]),
    }
    missing = replacements.keys() - state.keys()
    assert not missing, f"lightning's fit loop no longer saves {sorted(missing)}"
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    assert optimizer["total"]["completed"] == step, optimizer
    return state | replacements


def _link(old: Path, new: Path) -> None:
    """`new` becomes the same file as `old` (a copy where the file system has no links), in one move."""
    waiting = new.with_name(f"{new.name}.{os.getpid()}.tmp")
    waiting.unlink(missing_ok=True)
    try:
        os.link(old, waiting)
    except OSError:
        shutil.copyfile(old, waiting)
    os.replace(waiting, new)
