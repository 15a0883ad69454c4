"""What is said at the end of a run: how good, how fast, where it is and what to type next."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from softattn_lm.training.progress import duration


def say(console: Console, summary: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, found in summary["validation"].items():
        table.add_row(f"{name} loss", likelihood_line(found))
    table.add_row(
        "trained",
        (
            f"{summary['steps']} steps, {summary['tokens']:,} tokens in {duration(summary['seconds'])}, "
            f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['parameters']:,} parameters"
        ),
    )
    folder = Path(summary["folder"])
    table.add_row("checkpoints", ", ".join(str(path) for path in sorted((folder / "checkpoints").glob("*.ckpt"))))
    table.add_row("samples", str(folder / "samples.txt"))
    table.add_row("", "")
    for title, command in next_commands(folder, summary["opening"]):
        table.add_row(title, command, style="cyan")
    console.print(Panel(table, title=f"run {folder.name}", title_align="left", border_style="green", expand=False))


def likelihood_line(found: dict[str, Any]) -> str:
    said = f"{found['loss']:.4f} ± {found['loss_se']:.4f} nats per token, perplexity {found['perplexity']:.2f}"
    if found["bits_per_byte"] is not None:
        said += f", {found['bits_per_byte']:.4f} bits per byte"
    return said


def next_commands(folder: Path, opening: str) -> list[tuple[str, str]]:
    """In the form in which this process was started: `softattn sample` or `python scripts/sample.py`."""

    def command(name: str) -> str:
        started = Path(sys.argv[0])
        if started.suffix == ".py" and started.name != "__main__.py":
            return f"python {started.with_name(name)}.py" if started.parent.name == "scripts" else f"softattn {name}"
        return f"softattn {name}"

    # A prompt in this text's own letters, which needs no care with quoting.
    words = re.findall(r"\w+", opening) or ["a"]
    run = folder.name if folder.parent.name == "runs" else str(folder)
    return [
        ("write", f'{command("sample")} "{" ".join(words[:2])}" {run}'),
        ("measure", f"{command('evaluate')} {run}"),
        ("a variant", f"{command('train')} attention=formula scale=none"),
        ("your own text", f"{command('train')} data=text_file data.path=my.txt"),
        ("more steps", f"{command('train')} resume={run} steps=..."),
    ]


def ended(state: dict[str, Any]) -> str:
    """What to type after a run that was interrupted."""
    return f"interrupted at step {state['step']} of {state['steps']}, saved; continue with resume={state['run']}"
