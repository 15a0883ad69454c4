"""Room 5, text -> token files -> windows. Lightning appears in `module.py` only, which is not imported here."""

from softattn_lm.data.prepare import prepare, prepare_text, prepared_for
from softattn_lm.data.sources import ShippedText, Source, TextFiles
from softattn_lm.data.token_files import Prepared, Split
from softattn_lm.data.windows import TrainWindows, ValidationWindows, validation_windows

__all__ = [
    "Prepared", "ShippedText", "Source", "Split", "TextFiles", "TrainWindows", "ValidationWindows", "prepare",
    "prepare_text", "prepared_for", "validation_windows",
]  # fmt: skip
