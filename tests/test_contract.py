"""What every attention must keep, whoever writes it: variants are found by globbing, properties by their registry."""

from pathlib import Path

import pytest
import yaml

from softattn_lm.attention.scale import Constant
from softattn_lm.config.build import build
from softattn_lm.contract import PROPERTIES, Subject, kernels, run_property

VARIANTS = sorted(
    path.stem for path in Path("configs/attention").glob("*.yaml") if path.stem not in ("pattern", "custom")
)


def subject(name: str) -> Subject:
    node = yaml.safe_load(Path(f"configs/attention/{name}.yaml").read_text())
    if "dropout" in node:
        node["dropout"] = 0.0  # in a run it is the model's
    return Subject(name, build(node))


@pytest.mark.parametrize("property", PROPERTIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_contract_holds(variant, property):
    verdict = run_property(property, subject(variant))
    assert verdict.ok, (
        f"{verdict.sentence}: off by {verdict.worst.error:g}, {verdict.worst.allowed:g} allowed, {verdict.worst.where}"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_scale_of_zero_or_less_is_a_number_like_any_other(variant, monkeypatch):
    """torch's fused kernel made NaN of both, as it scales what it has hidden; tiles divided by the scale."""
    monkeypatch.setattr(kernels, "scales", lambda: [Constant(0.0), Constant(-0.3)])
    verdict = run_property("scales_are_honoured", subject(variant))
    assert verdict.ok, f"off by {verdict.worst.error:g}, {verdict.worst.where}"
