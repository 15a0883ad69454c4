"""Patterns over layers: a node that names several choices of its group gets their yaml files as its `layers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softattn_lm.config.nearest import meant
from softattn_lm.errors import UserError

_EXAMPLES = {"target": "my_kernel.py:Mine"}


def expand_patterns(composed: Any, folder: Path) -> None:
    """In place, before interpolations are resolved: `pattern: SSSL` or `[uniform, sdpa]` becomes a list of nodes.

    `letters` spells a string's letters; `options` holds overrides per choice, such as options.sliding.window=32.
    """
    from omegaconf import OmegaConf, open_dict

    for group, node in composed.items_ex(resolve=False):
        if not OmegaConf.is_dict(node) or "pattern" not in node:
            continue
        letters, options, pattern = node.letters, node.options, node.pattern
        if not pattern or not (isinstance(pattern, str) or OmegaConf.is_list(pattern)):
            example = OmegaConf.load(folder / group / "pattern.yaml").pattern
            example = example if isinstance(example, str) else f"[{','.join(example)}]"
            raise UserError(f"{group}.pattern names at least one {group}; type for example {group}.pattern={example}")
        names = [_spelled(group, letter, letters) for letter in pattern] if isinstance(pattern, str) else list(pattern)
        choices = sorted(file.stem for file in (folder / group).glob("*.yaml") if file.stem != "pattern")
        layers = []
        for name in names:
            if name not in choices:
                hint = meant(str(name), choices) or "; there are " + ", ".join(choices)
                raise UserError(f"{group}.pattern names {name}, which is no {group}{hint}")
            layer = OmegaConf.merge(OmegaConf.load(folder / group / f"{name}.yaml"), options.get(name, {}))
            for key in map(str, layer):
                if OmegaConf.is_missing(layer, key):
                    typed = f"+{group}.options.{name}.{key}"
                    raise UserError(
                        f"{group}.pattern uses {name}, which has no {key} yet; type {typed}={_EXAMPLES.get(key, '...')}"
                    )
            layers.append(layer)
        unused = sorted(set(options) - set(names))
        if unused:
            raise UserError(
                f"{group}.options.{unused[0]} sets what {group}.pattern does not use; it uses "
                f"{', '.join(sorted(set(names)))}"
            )
        with open_dict(composed):
            node.pattern, node.layers = names, layers
            del node["letters"], node["options"]


def _spelled(group: str, letter: str, letters: Any) -> str:
    if letter not in letters:
        known = ", ".join(f"{key} for {value}" for key, value in letters.items()) or "none: give a list of names"
        raise UserError(f"{group}.pattern has the letter {letter}; there are {known}")
    return str(letters[letter])
