"""Who runs the jobs that the planner hands out: slots of this machine, SLURM, or a person who is shown the commands."""

from softattn_lm.ablation.executors.base import Ended, Executor

__all__ = ["Ended", "Executor"]
