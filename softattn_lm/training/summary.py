"""What is said at the end of a run: how good, how fast, where it is and what to type next."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from softattn_lm.runs.names import run_name
from softattn_lm.training.progress import duration


def say(console: Console, summary: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, found in summary["validation"].items():
        table.add_row(f"{name} loss", likelihood_line(found))
    of_peak = "" if summary["mfu"] is None else f", {summary['mfu']:.1%} of the peak"
    table.add_row(
        "trained",
        (
            f"{summary['steps']} steps, {summary['tokens']:,} tokens in {duration(summary['seconds'])}, "
            f"{summary['tokens_per_second']:,.0f} tokens/s"
            f"{of_peak}, {summary['parameters']:,} parameters"
        ),
    )
    if summary["telemetry"] is not None:
        table.add_row("telemetry", cost_line(summary["telemetry"]))
    folder = Path(summary["folder"])
    kept = ", ".join(str(path) for path in sorted((folder / "checkpoints").glob("*.ckpt")))
    table.add_row("checkpoints", Text(kept))  # Text: a path may look like markup
    if (folder / "samples.txt").is_file():
        table.add_row("samples", Text(str(folder / "samples.txt")))
    heading = Text(f"run {run_name(folder)}")
    console.print(Panel(table, title=heading, title_align="left", border_style="green", expand=False))
    # Outside the frame and never folded, so that they can be copied.
    for title, command in next_commands(folder, summary["opening"], summary["telemetry"] is not None):
        console.print(Text(f"{title:<15}").append(command, style="cyan"), soft_wrap=True)


def likelihood_line(found: dict[str, Any]) -> str:
    said = f"{found['loss']:.4f} ± {found['loss_se']:.4f} nats per token, perplexity {found['perplexity']:.2f}"
    if found["bits_per_byte"] is not None:
        said += f", {found['bits_per_byte']:.4f} bits per byte"
    if found.get("accuracy") is not None:
        said = f"{found['loss']:.4f} ± {found['loss_se']:.4f} nats per answer, {found['accuracy']:.1%} of them right"
    return said


def cost_line(cost: dict[str, float]) -> str:
    share = cost["seconds"] / max(1e-9, cost["validation_seconds"])
    return f"{cost['seconds']:.2f} s per validation, {share:.1%} of the {cost['validation_seconds']:.2f} s it takes"


def next_commands(folder: Path, opening: str, looked: bool) -> list[tuple[str, str]]:
    """In the form in which this process was started: `softattn sample` or `python scripts/sample.py`."""

    def command(name: str) -> str:
        started = Path(sys.argv[0])
        if started.suffix == ".py" and started.name != "__main__.py":
            return f"python {started.with_name(name)}.py" if started.parent.name == "scripts" else f"softattn {name}"
        return f"softattn {name}"

    run = run_name(folder)
    return [
        ("write", f"{command('sample')} {shlex.quote(prompt(opening))} {shlex.quote(run)}"),
        ("measure", f"{command('evaluate')} {shlex.quote(run)}"),
        *([("look inside", f"{command('telemetry')} {shlex.quote(run)}")] if looked else []),
        ("a variant", f"{command('train')} attention=formula scale=none"),
        ("your own text", f"{command('train')} data=text_file data.path=my.txt"),
        ("more steps", f"{command('train')} {shlex.quote(f'resume={run}')} steps=..."),
    ]


def prompt(opening: str) -> str:
    """The first one or two whole words of a text that was cut anywhere, in its own characters: others might have no
    token."""
    for pattern in (r"(?<=\s)\w+(?: \w+)?(?=\W)", r"(?<=\s)\w+", r"\w+"):
        if found := re.search(pattern, opening):
            return found[0]
    return opening[:1]


def ended(state: dict[str, Any]) -> str:
    """What to type after a run that was interrupted."""
    resume = shlex.quote(f"resume={state['run']}")
    return f"interrupted at step {state['step']} of {state['steps']}, saved; continue with {resume}"
