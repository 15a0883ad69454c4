"""What a stranger could write into a config: nodes that would make a canary file if somebody built them."""

from pathlib import Path
from typing import Any

import torch


class Reduces:
    """Unpickled, it makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def live_nodes(canary: Path) -> dict[str, dict[str, Any]]:
    """Name -> a node that Hydra's own instantiate, with its block-list, builds; each makes `canary`."""
    pickled = canary.with_name("pickled.pt")
    torch.save(Reduces(canary), pickled)
    path = {"_target_": "pathlib.Path", "_args_": [str(canary)]}
    write = {"obj": 1, "f": str(canary)}
    return {
        "torch.load": {"_target_": "torch.load", "f": str(pickled), "weights_only": False},
        "builtins.open": {"_target_": "builtins.open", "file": str(canary), "mode": "w"},
        "Path.touch": {"_target_": "pathlib.Path.touch", "_args_": [path]},
        "FileHandler": {"_target_": "logging.FileHandler", "filename": str(canary)},
        "numpy.savetxt": {"_target_": "numpy.savetxt", "fname": str(canary), "X": [1.0]},
        "torch.save": {"_target_": "torch.save"} | write,
        "walks out to torch": {"_target_": "softattn_lm.model.decoder.torch.save"} | write,
        "walks out to Path": {"_target_": "softattn_lm.runs.files.Path.touch", "_args_": [path]},
        "ours, and no choice": {"_target_": "softattn_lm.runs.files.replace_text", "path": path, "text": "x"},
        "a method of ours": {"_target_": "softattn_lm.runs.files.write_json", "path": path, "value": 1},
        "in a list": {"_target_": "builtins.list", "_args_": [[{"_target_": "torch.save"} | write]]},
        "not recursive": {"_target_": "torch.save", "_recursive_": False, "_convert_": "all"} | write,
    }


def dead_nodes() -> dict[str, Any]:
    """Name -> a node that would be refused or harmless elsewhere too, and is refused here before anything is asked."""
    return {
        "os.system": {"_target_": "softattn_lm.runs.files.os.system", "command": "touch canary"},
        "subprocess": {"_target_": "softattn_lm.runs.versions.subprocess.run", "args": ["touch", "canary"]},
        "get_method": {"_target_": "hydra.utils.get_method", "path": "os.system"},
        "target is a list": {"_target_": ["builtins.open"]},
        "target is a mapping": {"_target_": {"_target_": "builtins.open"}},
        "target is a number": {"_target_": 3},
        "target is nothing": {"_target_": None},
        "target in another case": {"_target_": "softattn_lm.attention.kernels.sdpa.sdpa"},
        "target with a blank": {"_target_": " softattn_lm.attention.kernels.sdpa.Sdpa"},
        "a class of another group": {"_target_": "softattn_lm.data.sources.TextFiles", "path": "/**"},
        "code nobody trusted": {
            "_target_": "softattn_lm.config.custom.custom",
            "target": "evil.py:Evil",
            "options": {},
        },
    }
