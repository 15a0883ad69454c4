"""Reads back the `.wandb` file of an offline run, for which wandb itself has no reader.

The file is a log of LevelDB's format: 7 bytes of header, then blocks of 32 KiB of records, each of which begins with
checksum (4 bytes), length (2) and type (1: whole, 2, 3, 4: first, middle and last part). Their contents are protobuf.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER, RECORD = 32768, 7, "<IHB"


def records(file: Path) -> list[Any]:
    """wandb's protobuf records, as far as the file is whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, found = file.read_bytes(), HEADER, b"", []
    head = struct.calcsize(RECORD)
    while place + head <= len(data):
        left = BLOCK - place % BLOCK
        if left < head:
            place += left  # too little for a record: filled up with zeros
            continue
        _, length, kind = struct.unpack_from(RECORD, data, place)
        if place + head + length > len(data):
            break
        parts += data[place + head : place + head + length]
        place += head + length
        if kind in (1, 4):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of the one offline run in a run folder, {"_step": 1, "train/loss": ...}."""
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    rows = (record.history for record in records(file) if record.WhichOneof("record_type") == "history")
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def exit_code(folder: Path) -> int | None:
    """What the run was marked with at its end; None for one that came to none."""
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    codes = [record.exit.exit_code for record in records(file) if record.WhichOneof("record_type") == "exit"]
    return codes[0] if codes else None


def run_id(folder: Path) -> str:
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    (found,) = {record.run.run_id for record in records(file) if record.WhichOneof("record_type") == "run"}
    return found
