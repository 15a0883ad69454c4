"""Whether runs can answer what is asked, told from their settings: before one of them is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from softattn_lm.ablation.jobs import Configs
from softattn_lm.ablation.plan import Plan
from softattn_lm.errors import UserError


def require_answerable(plan: Plan, configs: Configs) -> None:
    """Raises UserError, naming the arm, for settings that do not fit, for data without a part to choose or to report
    on, and for a metric that the data knows nothing of.
    """
    for arm in plan.arms:
        data = configs.of(arm, plan.sizes[0])["data"]
        task = ".tasks." in data["_target_"]
        if plan.metric.name == "accuracy" and not task:
            raise UserError(
                f"metric=accuracy is of the answers of a task, and the data of arm {arm} is a text, which asks "
                "nothing; type metric=loss, or a task such as data=recall"
            )
        missing = None if task else _missing_part(data)
        if missing is not None:
            name, setting = missing
            raise UserError(
                f"arm {arm}: {setting}={data.get(setting.partition('.')[2])} leaves no {name} part, and an ablation "
                f"chooses rates on the validation part and reports the test part; type {setting}=0.1"
            )


def _missing_part(data: Mapping[str, Any]) -> tuple[str, str] | None:
    """(name, the setting that makes one) of a part that a text has not; null is the source's own choice."""
    for name, fraction, own in (
        ("validation", "val_fraction", "validation_split"),
        ("test", "test_fraction", "test_split"),
    ):
        if data.get(fraction) == 0 and not data.get(own):
            return name, f"data.{fraction}"
    return None


def require_opponent(plan: Plan, unfit: Mapping[str, str]) -> None:
    """Raises UserError where nothing is left to compare. `unfit`: arms that cannot be trained, and why, by name."""
    if plan.baseline in unfit:
        raise UserError(f"the baseline cannot be trained: {unfit[plan.baseline]}")
    if unfit and not plan.arms.keys() - unfit.keys() - {plan.baseline}:
        said = "; ".join(unfit.values())
        raise UserError(f"{said}; nothing is left to compare with {plan.baseline}, and nothing was trained")
