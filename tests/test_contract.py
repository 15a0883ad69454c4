"""What every attention must keep, whoever writes it: variants are found by globbing, properties by their registry."""

from pathlib import Path

import pytest
import yaml

from softattn_lm.config.build import build
from softattn_lm.contract import PROPERTIES, Subject, run_property

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
