"""benchmark: `softattn benchmark TOPIC` measures and sets what it finds beside what was aimed at.

attention: time and memory of the implementations; cache: what decoding remembers; generate, train: tokens per second;
time_to_loss: seconds of training to a loss; loss: that of a large vocabulary; data: preparing a text; startup: until a
command answers; gpu: one device.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from softattn_lm.config.settings import BenchmarkSettings, section
from softattn_lm.errors import UserError
from softattn_lm.runs.new import made_folder

# Topic -> the settings it reads beside `runs`. Each has a module benchmark_TOPIC beside this one, whose
# `benchmark(settings, file)` prints tables and writes a file.
TOPICS: dict[str, tuple[str, ...]] = {
    "attention": ("heads", "head_dim", "lengths", "window", "repeats"),
    "cache": ("heads", "head_dim", "lengths", "window"),
    "generate": ("repeats",),
    "train": ("repeats", "long"),
    "time_to_loss": ("seeds", "text"),
    "loss": ("repeats",),
    "data": ("repeats",),
    "startup": ("repeats",),
    "gpu": (),
}
SIZES = ("heads", "head_dim", "window", "repeats", "lengths")


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`words`: one topic. Raises UserError for another, for a setting it does not read, or sizes that are no sizes."""
    if len(words) != 1 or words[0] not in TOPICS:
        came = f"; {' '.join(words)!r} came" if words else ""
        raise UserError(f"benchmark measures one topic, of: {', '.join(TOPICS)}{came}")
    settings = section(BenchmarkSettings, cfg)
    _only_read(words[0], settings)
    for name in SIZES:
        values = getattr(settings, name)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise UserError(f"{name}={value} must be 1 or more")
    if not settings.lengths:
        raise UserError("lengths=[] measures nothing; type lengths=[2048,4096]")
    if not settings.seeds or min(settings.seeds) < 0:
        raise UserError(f"seeds={settings.seeds} must be numbers of 0 or more, such as seeds=[0,1,2,3,4]")
    file = made_folder(Path(settings.runs).expanduser() / "benchmark") / f"{words[0]}.json"
    # Torch comes with it, and only now.
    import_module(f"softattn_lm.commands.benchmark_{words[0]}").benchmark(settings, file)


def _only_read(topic: str, settings: BenchmarkSettings) -> None:
    """Raises UserError for a setting that is not as it is shipped, and that the topic does not read."""
    for name, shipped in vars(BenchmarkSettings()).items():
        value, readers = getattr(settings, name), [other for other, read in TOPICS.items() if name in read]
        if value != shipped and name != "runs" and topic not in readers:
            raise UserError(f"benchmark {topic} does not read {name}={value}; {', '.join(readers)} would")
