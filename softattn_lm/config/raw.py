"""Text and paths that must reach us as typed: they pass Hydra as hexadecimal, which no grammar touches.

data.path=It's, here (1).txt  ->  data.path=rawhex_497427...  -> Hydra, sweeps, launchers ->  It's, here (1).txt
"""

from __future__ import annotations

import re
from typing import Any

_ENCODED = re.compile(r"rawhex_((?:[0-9a-f]{2})*)")


def encode(text: str) -> str:
    return "rawhex_" + text.encode("utf-8", "surrogateescape").hex()


def decode(text: str) -> str:
    """`text` with every encoded part as it was typed."""
    return _ENCODED.sub(lambda match: bytes.fromhex(match[1]).decode("utf-8", "surrogateescape"), text)


def decode_tree(value: Any) -> Any:
    """A plain config with all its strings decoded."""
    if isinstance(value, dict):
        return {key: decode_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_tree(item) for item in value]
    return decode(value) if isinstance(value, str) else value
