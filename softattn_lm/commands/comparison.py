"""What every benchmark has in common: interleaved repeats, ratios within a repeat, a table, and a file of all figures.

What slows the machine for a while slows every case of a round, so a ratio is taken within its round; reported are the
median over rounds, and the least and the most.
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from softattn_lm.runs.files import write_json

if TYPE_CHECKING:  # `benchmark gpu` runs where rich is not installed
    from rich.console import Console
    from rich.table import Table

WIDTH = 180  # columns of a file or a pipe, which has no width of its own
PACKAGES = ("torch", "lightning", "transformers", "x-transformers", "litgpt", "numpy")


@dataclass(frozen=True)
class Row:
    """One comparison. ours, peers: a figure of each repeat, in the same order.

    ratio: ours over that of the peer called `against`. target: what it should be at least or, where less is better, at
    most. missed: what was compared is not the same work, so the target is not reached, whatever the ratio.
    limit: what the machine could do at most, in the same unit, of each repeat, or one for all.
    """

    what: str
    unit: str
    ours: list[float]
    peers: dict[str, list[float]]
    against: str
    target: float | None = None
    limit: float | list[float] | None = None
    more_is_better: bool = True
    missed: bool = False

    @property
    def ratios(self) -> list[float]:
        """Of each repeat."""
        return [a / b for a, b in zip(self.ours, self.peers[self.against], strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the most of the ratios."""
        return min(self.ratios), max(self.ratios)

    @property
    def of_limit(self) -> float | None:
        """Ours over the limit, within a repeat: the share of it that is reached, where more is better."""
        if self.limit is None:
            return None
        limits = self.limit if isinstance(self.limit, list) else [self.limit] * len(self.ours)
        return statistics.median(a / b for a, b in zip(self.ours, limits, strict=True))

    @property
    def bound(self) -> str:
        return "at least" if self.more_is_better else "at most"

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return not self.missed and (self.ratio >= self.target if self.more_is_better else self.ratio <= self.target)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for the file."""
        return {
            **asdict(self),
            "ratio_is": f"ours / {self.against}",
            "target_is": self.bound,
            "ratio": self.ratio,
            "spread": list(self.spread),
            "of_limit": self.of_limit,
            "reached": self.reached,
        }


def interleaved(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Case -> its figure in each of `repeats` rounds, in which every case runs once; a round before them warms up."""
    for case in cases.values():
        case()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            found[name].append(case())
    return found


def no_compiler(error: RuntimeError) -> bool:
    """Whether torch.compile found no C++ compiler that works: its message names its error."""
    return any(name in str(error) for name in ("InvalidCxxCompiler", "CppCompileError"))


def seconds_of(step: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_memory() -> int:
    """Bytes that this process has held at most. macOS counts in bytes, Linux in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, Any]:
    """What a time depends on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=WIDTH)


@dataclass
class Report:
    """Opens with the machine, and ends with a table and a file, which holds every figure."""

    settings: dict[str, Any]
    file: Path
    console: Console = field(default_factory=_console)
    found: dict[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        self.found = {
            "command": shlex.join(sys.argv),
            "settings": self.settings,
            "machine": machine(),
            "started": time.strftime("%Y-%m-%d %H:%M"),
        }
        self.console.print(
            "  ".join(f"{key}: {value}" for key, value in self.found["machine"].items()), highlight=False
        )
        if os.getloadavg()[0] > 0.3 * (os.cpu_count() or 1):
            self.console.print(
                "The machine is busy, and loops of many small steps suffer most from that: expect wrong times."
            )

    def close(self, rows: list[Row], *tables: Table) -> None:
        """`rows` go to a table and to the file, beside what was put in `found`; `tables` are printed behind it."""
        if rows:
            self.found["rows"] = [row.as_dict() for row in rows]
            self.console.print(table_of(rows))
        write_json(self.file, self.found)
        self.console.print(*tables, f"All figures: {self.file}")


def table_of(rows: Iterable[Row]) -> Table:
    """The targets stand with what was reached; a ratio's least and most are those of the repeats."""
    from rich.table import Table

    columns = ("", "ours", "others", "limit", "ours over others, least to most", "target")
    table = Table(*columns, title="medians over interleaved repeats")
    for row in rows:
        others = "\n".join(f"{_figure(statistics.median(found))} {name}" for name, found in row.peers.items())
        limit = "-"
        if row.limit is not None and row.of_limit is not None:
            most_of = statistics.median(row.limit) if isinstance(row.limit, list) else row.limit
            limit = f"{_figure(most_of)}\n({row.of_limit:.0%})"
        least, most = row.spread
        ratio = f"{_ratio(row.ratio)} of {row.against}\n{_ratio(least)} to {_ratio(most)}"
        target = "-" if row.target is None else f"{row.bound} {row.target:.3g}: {'yes' if row.reached else 'NO'}"
        ours = f"{_figure(statistics.median(row.ours))}"
        table.add_row(f"{row.what}\n{row.unit}", ours, others, limit, ratio, target)
    return table


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
