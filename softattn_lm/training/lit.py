"""The training step: cross entropy on the next token, one optimizer, a schedule read per optimizer step.

Nothing here depends on how the run is executed: dropout is seeded from (seed, micro-batch, rank) before each
micro-batch and the schedule is a function of the step, so neither has a state that an interrupted run could lose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from softattn_lm.errors import UserError
from softattn_lm.evaluation.likelihood import Likelihood, LikelihoodResult
from softattn_lm.training.loss import Chunked, batch_loss, make_loss
from softattn_lm.training.nonfinite import first_in_backward, first_in_forward
from softattn_lm.training.schedule import Schedule

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM, ParameterRole


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Tensors stay on the device, so that reading them waits for nothing until they are written.

    loss: mean over this rank's micro-batches, nats per token, before the update. grad_norm: of the whole gradient,
    before clipping. lr: the rate of the first group, which the others are multiples of.
    """

    step: int  # steps done, this one included
    loss: Tensor
    grad_norm: Tensor
    lr: float


@dataclass(frozen=True)
class ValidationSet:
    """`bytes_per_token` of its whole text; None where there is no text behind the tokens. task: only answers are asked
    for, and how many are right is told.
    """

    name: str
    bytes_per_token: float | None
    task: bool = False


def dropout_seed(seed: int, micro_batch: int, rank: int) -> int:
    """63 bits that differ for neighbouring arguments in no simple way."""
    digest = hashlib.blake2b(f"dropout {seed} {micro_batch} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_device(seed: int, device: torch.device) -> None:
    """What torch.manual_seed does, for the processor and `device` alone: for kinds of device that are not there, that
    one formats a traceback at each call, a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class LitGPT(LightningModule):
    """Trains `model`; `last_step` and `validation` hold the latest results for the callbacks to write down.

    `val_batch_size`: windows of a validation batch on each rank, which tells where in the text a batch stands.
    `skipped`: steps left out so far, of at most `max_skipped`, because their gradient was not finite. `validation_cut`:
    the validation at hand is left in the middle, and its figures are thrown away. `seen`: by name, the sums over
    each window of the latest validation, in reading order and in float32; {} where ranks share the windows.
    """

    def __init__(
        self,
        model: DecoderLM,
        *,
        optimizer: Callable[[list[ParameterRole]], Optimizer],
        schedule: Schedule,
        steps: int,
        accumulate: int,
        seed: int,
        validation_sets: list[ValidationSet],
        compiled: bool = False,
        loss_chunk: int | None = None,
        checkpoint_activations: Literal["none", "block"] = "none",
        nonfinite: Literal["stop", "skip"] = "stop",
        max_skipped: int = 10,
        val_batch_size: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer, self.schedule = optimizer, schedule
        self.steps, self.accumulate, self.seed, self.nonfinite = steps, accumulate, seed, nonfinite
        self.max_skipped, self.skipped = max_skipped, 0
        self.validation_sets, self.val_batch_size = validation_sets, val_batch_size
        self.last_step: StepResult | None = None
        self.validation: dict[str, LikelihoodResult] = {}
        self.validation_cut = False
        self.seen: dict[str, Likelihood] = {}
        self._window: list[Tensor] = []
        self._inputs: list[tuple[int, list[Tensor]]] = []  # micro-batches of the window, to look again at a bad one
        self._grad_norm: Tensor | None = None
        self._likelihoods: list[Likelihood] = []
        self.loss = make_loss(model.vocab_size, loss_chunk)
        model.recomputes = checkpoint_activations == "block"
        if compiled:
            if isinstance(self.loss, Chunked):  # whose loop would be compiled once for each chunk, for minutes
                self.loss = torch.compiler.disable(self.loss)
            model.compile()  # in place: parameter names stay as they are; with the loss, which the model computes

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """See `batch_loss`. `batch_idx` counts micro-batches from the start of the run."""
        loss = self._loss(self.model, batch, batch_idx)
        self._window.append(loss.detach())
        self._inputs.append((batch_idx, batch))
        return loss

    def _loss(self, model: Callable[..., Tensor], batch: list[Tensor], batch_idx: int) -> Tensor:
        seed_device(dropout_seed(self.seed, batch_idx, self.global_rank), self.device)
        return batch_loss(model, batch, self.loss)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        step = self.trainer.global_step
        multiplier = self.schedule.multiplier(step, self.steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        assert len(self._window) == self.accumulate and self._grad_norm is not None, (
            len(self._window),
            self.accumulate,
        )
        loss = torch.stack(self._window).mean()
        self.last_step = StepResult(step + 1, loss, self._grad_norm, optimizer.param_groups[0]["lr"])
        self._window, self._inputs = [], []

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lightning's clipping by norm, which throws the norm away; kept here, it need not be computed a second
        time.

        A step whose gradient is not finite changes nothing, neither weights nor momentum. All ranks have the same norm,
        and so decide alike. Reading it waits for the device once a step: later would be too late for the weights.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        self._grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not bool(torch.isfinite(self._grad_norm)):
            if self.nonfinite == "stop" or self.skipped >= self.max_skipped:
                raise UserError(self._no_longer_finite(optimizer.param_groups[0]["lr"]))
            self.skipped += 1
            for p in parameters:
                p.grad = None  # a parameter without a gradient is left alone, its momentum too
        elif gradient_clip_val:
            clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def _no_longer_finite(self, lr: float) -> str:
        """One line: the step, the layer and what to do. Ranks compute alike, as divided parameters are gathered."""
        losses_are = bool(torch.isfinite(torch.stack(self._window)).all())
        with self.trainer.precision_plugin.forward_context():
            # `forward`: a compiled model would not call the hooks
            passes = [partial(self._loss, self.model.forward, batch, index) for index, batch in self._inputs]
            in_forward = first_in_forward(self.model, passes)
            in_backward = first_in_backward(self.model, passes) if losses_are and in_forward is None else None
        what = "gradient" if losses_are and in_forward is None else "loss"
        place = "" if in_forward is None else f", first in {in_forward}"
        place = place if in_backward is None else f", first at the output of {in_backward}"
        if self.nonfinite == "skip":
            hint = f"training.max_skipped={self.max_skipped} such steps have been left out already"
        else:
            hint = "training.nonfinite=skip leaves such steps out"
        return (
            f"the training {what} is no longer finite at step {self.trainer.global_step + 1}{place}; try a smaller lr "
            f"(it was {lr:.3g}) or training.clip=1.0; {hint}"
        )

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.make_optimizer(self.model.parameter_roles())
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return optimizer

    def configure_model(self) -> None:
        """Under FSDP each block is divided among the devices, and gathered when it is needed."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if isinstance(self.model, FSDPModule):
                return
            mesh = self.trainer.strategy.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    # -- validation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._likelihoods = [Likelihood(which.task) for which in self.validation_sets]
        self.validation_cut = False

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, *documents = batch  # (B, T) each
        logits = self.model(x, documents=documents[0] if documents else None)
        # Ranks take batches of the text in turn, see `ValidationWindows`.
        first = (batch_idx * self.trainer.world_size + self.global_rank) * self.val_batch_size
        self._likelihoods[dataloader_idx].add(logits, y, first)

    def on_validation_epoch_end(self) -> None:
        self.validation = (
            {}
            if self.validation_cut
            else {
                which.name: likelihood.result(which.bytes_per_token, self._sum_over_ranks)
                for which, likelihood in zip(self.validation_sets, self._likelihoods, strict=True)
            }
        )
        names = [which.name for which in self.validation_sets]
        alone = self.trainer.world_size == 1 and self.trainer.precision == "32-true"
        self.seen = dict(zip(names, self._likelihoods, strict=True)) if alone and not self.validation_cut else {}
        self._likelihoods = []

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return values
        on_device = values.float() if self.device.type == "mps" else values
        return self.trainer.strategy.reduce(on_device.to(self.device), reduce_op="sum").cpu().double()
