"""benchmark: `softattn benchmark attention` measures time and memory and sets them beside what was aimed at;
`softattn benchmark cache` what decoding remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from softattn_lm.config.settings import BenchmarkSettings, section
from softattn_lm.errors import UserError


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`words`: one topic. Raises UserError for another, or for sizes that are no sizes."""
    topics: dict[str, Callable[[BenchmarkSettings, Path], None]] = {"attention": _attention, "cache": _cache}
    if len(words) != 1 or words[0] not in topics:
        came = f"; {' '.join(words)!r} came" if words else ""
        raise UserError(f"benchmark measures one topic, of: {', '.join(topics)}{came}")
    settings = section(BenchmarkSettings, cfg)
    for name, values in {**vars(settings), "runs": 1}.items():
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise UserError(f"{name}={value} must be 1 or more")
    if not settings.lengths:
        raise UserError("lengths=[] measures nothing; type lengths=[2048,4096]")
    file = Path(settings.runs).expanduser() / "benchmark" / f"{words[0]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    topics[words[0]](settings, file)


def _attention(settings: BenchmarkSettings, file: Path) -> None:
    # Torch comes with it, and only now.
    from softattn_lm.commands.benchmark_attention import benchmark

    benchmark(settings, file)


def _cache(settings: BenchmarkSettings, file: Path) -> None:
    from softattn_lm.commands.benchmark_cache import benchmark

    benchmark(settings, file)
