"""The short form of tests/fuzz.py: the same inputs each time. The long form makes up others."""

import pytest

from tests.fuzz import KINDS, Workshop, fuzz

EXAMPLES = {"overrides": 25, "texts": 60, "damage": 60, "contents": 60, "configs": 40, "prompts": 15}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", KINDS)
def test_random_input_works_or_is_one_line(kind: str, shop: Workshop) -> None:
    examples = EXAMPLES.get(kind, 100)
    assert fuzz(kind, shop, examples, same=True) >= examples // 2
