"""executor=print: the commands on stdout, and all else there is to say on stderr, so that a shell may be given them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from softattn_lm.ablation import journal
from softattn_lm.ablation.executors.printed import commands
from softattn_lm.ablation.jobs import Configs
from softattn_lm.ablation.plan import Plan
from softattn_lm.ablation.planner import Result
from softattn_lm.ablation.stages import Stages
from softattn_lm.training.console import plain_console


def printed(
    plan: Plan, folder: Path, configs: Configs, execution: list[str], unfit: dict[str, str], out: TextIO
) -> Result:
    """Prints on `out` what can run now. `unfit`: arms that cannot be built, and why. Logs what a planner would."""
    fit = replace(plan, arms={arm: words for arm, words in plan.arms.items() if arm not in unfit})
    stages = Stages(fit, folder, configs)
    found = commands(stages, folder, execution)
    console = plain_console(stderr=True)
    journal.append(folder, "started", process=os.getpid())
    for arm, reason in unfit.items():
        journal.append(folder, "failed", run=None, arm=arm, reason=reason)
        console.print(f"arm {arm} is left out: {reason}", soft_wrap=True)
    arms = {job.path: job.arm for job in stages.known()}
    for path in found.failed:
        journal.append(folder, "failed", run=path, arm=arms[path], reason=stages.given_up[path])
    left = len(found.commands) + len(found.at_work)
    journal.append(folder, "stopped", by="end", left=left)
    if not left:
        ends = [stages.outcome(job).end for job in stages.known()]
        return Result(ends.count("finished"), ends.count("diverged"), unfit | found.failed)
    for path, reason in found.failed.items():
        console.print(f"failed: {path}: {reason}", soft_wrap=True)
    for line in found.commands:
        print(line, file=out)
    busy = f", {len(found.at_work)} being trained" if found.at_work else ""
    console.print(f"{len(found.commands)} to run{busy}; when all have ended, type this again", soft_wrap=True)
    return Result(left=left, stopped=True)
