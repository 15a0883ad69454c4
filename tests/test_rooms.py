"""Which room may import which: the rules that keep the inner rooms plain torch and `--help` fast."""

import ast
import sys
from pathlib import Path

import pytest

import softattn_lm

PACKAGE = Path(softattn_lm.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Room -> the rooms of ours it may import, besides itself and errors.py. A file outside any room counts as one.
INSIDE = {
    "attention": {"config"},
    "position": {"config"},
    "model": {"attention", "position", "config"},
    "contract": {"attention", "position", "model", "config"},
    "tokenizer": set(),
    "data": {"tokenizer", "config"},
    "evaluation": {"attention", "position", "model", "tokenizer", "data", "config", "runs", "shares"},
    "interop": {"model", "tokenizer", "data", "config", "runs"},
    "training": {"model", "data", "tokenizer", "evaluation", "config", "runs", "own_files"},
    "ablation": {"config", "runs", "shares"},
    "config": set(),
    "runs": set(),
    "shares": set(),
    "own_files": set(),
    "errors": set(),
}
# Room -> packages it never imports, not even inside a function.
NEVER = {
    "attention": {"lightning", "hydra", "omegaconf", "datasets", "wandb", "tokenizers"},
    "position": {"lightning", "hydra", "omegaconf", "datasets", "wandb", "tokenizers"},
    "model": {"lightning", "hydra", "omegaconf", "datasets", "wandb", "tokenizers"},
    "contract": {"lightning", "hydra", "omegaconf", "datasets", "wandb", "tokenizers"},
    "tokenizer": {"torch", "lightning", "hydra", "omegaconf"},
    "data": {"hydra", "omegaconf", "wandb"},
    "evaluation": {"lightning", "hydra", "omegaconf", "wandb"},
    "interop": {"lightning", "hydra", "omegaconf", "wandb"},
    "training": {"wandb", "hydra", "omegaconf"},
    "ablation": {"torch", "lightning"},
    "config": {"torch", "lightning", "datasets", "wandb"},
    "runs": {"torch", "lightning", "hydra", "omegaconf"},
    "shares": {"torch", "lightning", "hydra", "omegaconf"},
    "cli": {"torch", "lightning"},
}
# What a position makes and a kernel reads has one type, which lives with the reader.
SHARED_TYPES = {
    "position": {"softattn_lm.attention.bias", "softattn_lm.attention.visibility"},
    # A class from a user's file is compared with the one; the other, standard library only, finds a person's files.
    "config": {"softattn_lm.attention.kernel", "softattn_lm.data.paths"},
}
WANDB_LOGGER = Path("training/tracking.py")
# Slow or optional packages: imported inside the function that needs them, in every room.
INSIDE_FUNCTIONS_ONLY = {
    *("wandb", "datasets", "matplotlib", "transformers", "lm_eval", "pandas", "hydra", "omegaconf"),
    *("litgpt", "x_transformers"),
}


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def imports(file: Path) -> list[tuple[str, bool]]:
    """(module, at top level) of every import but those for type checkers."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.extend((f"{node.module}.{alias.name}", top) for alias in node.names)
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), True)
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_room_imports_only_the_rooms_it_may(file: Path) -> None:
    room = room_of(file)
    if room not in INSIDE:
        return  # commands, cli: everything
    may = {room, "errors", "__version__", *INSIDE[room]}
    for module, _ in imports(file):
        if module.startswith("softattn_lm.") and module.rpartition(".")[0] not in SHARED_TYPES.get(room, ()):
            assert module.split(".")[1] in may, f"{room} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_room_never_imports_what_is_barred_from_it(file: Path) -> None:
    packages = {module.split(".")[0] for module, _ in imports(file)}
    barred = NEVER.get(room_of(file), set()) - ({"wandb"} if file == WANDB_LOGGER else set())
    assert not packages & barred
    if room_of(file) == "data" and file.name != "module.py":
        assert "lightning" not in packages


@pytest.mark.parametrize("file", FILES, ids=str)
def test_slow_packages_are_imported_inside_functions(file: Path) -> None:
    at_top = {module.split(".")[0] for module, top in imports(file) if top}
    assert not at_top & INSIDE_FUNCTIONS_ONLY


def test_scripts_are_imported_by_nobody() -> None:
    for file in FILES:
        assert not any(module.split(".")[0] == "scripts" for module, _ in imports(file))


def test_only_the_wrapper_catches_every_exception() -> None:
    catching = {
        str(file)
        for file in FILES
        for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "Exception" in ast.unparse(node.type).split())
    }
    assert catching == {"cli.py"}


def test_the_rules_see_imports_inside_functions_and_skip_those_for_type_checkers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "x.py").write_text(
        "import os\nfrom a.b import c\ndef f():\n    import torch\nif TYPE_CHECKING:\n    import lightning\n"
    )
    assert imports(Path("x.py")) == [("os", True), ("a.b.c", True), ("torch", False)]
