"""Lightning's way to disk, ours: durable, atomic, plain containers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from softattn_lm.training.checkpoint import read_checkpoint, write_checkpoint


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's own goes through the temporary folder and a copy across file systems, without fsync."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        assert storage_options is None, storage_options
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        assert weights_only is not False, "checkpoints are read as plain data only"
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
