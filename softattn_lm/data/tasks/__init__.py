"""Tasks that measure retrieval: symbols instead of text, fresh in every step, with loss at answers only."""

from softattn_lm.data.tasks.base import FixedSet, Fresh, Sequences, Task, TaskStream, TaskWindows
from softattn_lm.data.tasks.copying import Copy, Induction
from softattn_lm.data.tasks.recall import Forget, NoisyRecall, Recall

__all__ = [
    "Copy", "FixedSet", "Forget", "Fresh", "Induction", "NoisyRecall", "Recall", "Sequences", "Task", "TaskStream",
    "TaskWindows",
]  # fmt: skip
