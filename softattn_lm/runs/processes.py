"""Which of several processes of one command writes, and who started them."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Whether this is the process that writes: the only one, or the first of those that train together."""
    for rank in ("RANK", "SLURM_PROCID"):  # torchrun's and SLURM's, over all nodes
        if rank in os.environ:
            return os.environ[rank] == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def started_from_outside() -> bool:
    """Whether a launcher (torchrun, srun) started several processes of this command, and not Lightning the others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or int(os.environ.get("SLURM_NTASKS", "1")) > 1
