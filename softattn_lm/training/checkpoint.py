"""What a checkpoint is: one file of plain containers and tensors that rebuilds model and tokenizer by itself.

Beside Lightning's own keys it carries

    "softattn": {"format": 1, "config": {...}, "tokenizer": {...}, "step": int, "metrics": {...}, "versions": {...},
    "data": {...}}

It is read with `weights_only=True` and built from an allow-list of names, so a stranger's file can run no code; what
else a stranger's file might do is asked in training/untrusted.py.
No Lightning here: sampling and evaluating start without it.
"""

from __future__ import annotations

import os
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from softattn_lm.config.stored import stored_model
from softattn_lm.errors import UserError
from softattn_lm.tokenizer import from_state
from softattn_lm.training.untrusted import built, require_entries, require_fitting, require_whole

if TYPE_CHECKING:
    from softattn_lm.model.decoder import DecoderLM
    from softattn_lm.tokenizer.base import Tokenizer

FORMAT = 1
# Names of the model's parameters inside the Lightning module, see `LitGPT.model`.
PREFIX = "model."


@dataclass(frozen=True)
class LoadedRun:
    """`model` in eval mode; `metrics`: the latest validation figures when it was saved, such as {"loss": 1.9}; `data`:
    the "fingerprint" and "source" of what it was trained on."""

    model: DecoderLM
    tokenizer: Tokenizer
    config: dict[str, Any]
    step: int
    metrics: dict[str, float]
    data: dict[str, str]


def plain(value: Any, where: str = "checkpoint") -> Any:
    """The same in dict, list, str, int, float, bool, None and tensors; tuples become lists. Raises TypeError on the
    rest.

    Subclasses are flattened too (OrderedDict, numpy's float64, an enum of int): `weights_only=True` refuses them on
    loading, which is too late to find out.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{where}: a key of type {type(key).__name__} cannot be saved")
        return {plain(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{where}: {type(value).__module__}.{type(value).__qualname__} is no plain container and cannot be saved"
    )


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Put a whole, durable file in place of the old one, or leave the old one: temporary file, fsync, rename, fsync
    folder. Raises OSError when there is no room or no permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file and not in the system's temporary folder: a rename across file systems would be a copy.
    waiting = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    waiting.unlink(missing_ok=True)  # of another process that had this number
    try:
        with waiting.open("xb") as file:
            _save(plain(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    finally:
        waiting.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself is durable only once the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _save(value: Any, file: BinaryIO) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # torch's zip writer notices a failed write later, by its own arithmetic.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def read_checkpoint(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The contents of a checkpoint of ours. Raises UserError for a file that is missing, cut short or something
    else.
    """
    if not path.is_file():
        kept = sorted(p.stem for p in path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        hint = f"there are {', '.join(kept)}" if kept else "the run has saved none yet"
        raise UserError(f"no checkpoint {path}; {hint}")
    require_whole(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # what it cannot read it refuses
            checkpoint = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than plain data and tensors and is not loaded, as it could run code; "
            "type a run of softattn_lm"
        ) from None
    except (RuntimeError, OSError, EOFError, LookupError, TypeError, AttributeError, ValueError, MemoryError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as a checkpoint, it may be cut short: {first}") from None
    own = checkpoint.get("softattn") if isinstance(checkpoint, dict) else None
    if not isinstance(own, dict) or "state_dict" not in checkpoint:
        raise UserError(f"{path} is not a checkpoint of softattn_lm: it has no entry 'softattn'")
    if own.get("format") != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {own.get('format')!r:.40}, and this version reads {FORMAT}; update "
            "softattn_lm"
        )
    require_entries(checkpoint, path)
    return checkpoint


def load_run(folder: Path, which: str = "last", device: str = "cpu") -> LoadedRun:
    """Rebuild what was saved as `which` ("last", "best", "step-00001000") in a run folder, with no other information.

    Raises UserError where `read_checkpoint` does, and when weights and config do not belong together.
    """
    path = folder / "checkpoints" / f"{which}.ckpt"
    checkpoint = read_checkpoint(path, device)
    own = checkpoint["softattn"]
    node, seed = stored_model(own["config"], str(path))
    try:
        tokenizer = from_state(own["tokenizer"])
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    weights = {name.removeprefix(PREFIX): value for name, value in checkpoint["state_dict"].items()}
    given = {"vocab_size": tokenizer.vocab_size, "seed": seed}
    require_fitting(node, given, weights, path)
    model: DecoderLM = built(node, given, path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{path}: the weights do not fit the saved config: {' '.join(str(error).split())[:300]}"
        ) from None
    model.to(device).eval()
    return LoadedRun(model, tokenizer, own["config"], own["step"], own["metrics"], own["data"])
