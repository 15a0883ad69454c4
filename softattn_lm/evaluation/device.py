"""Which device a word of the command line means."""

from __future__ import annotations

import torch

from softattn_lm.errors import UserError


def pick_device(word: str) -> str:
    """ "auto" is the fastest of this machine. Raises UserError for a name torch does not know or a device that is not
    here.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if word == "auto":
        return next(name for name, here in available.items() if here)
    kind = word.partition(":")[0]
    if not available.get(kind, False):
        here = ", ".join(name for name, found in available.items() if found)
        raise UserError(f"device={word} is not on this machine; there is {here}, and device=auto takes the fastest")
    return word
