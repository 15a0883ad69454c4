"""What the server of tests/ranks.py has done before it makes a process: imported everything, and composed a config."""

import softattn_lm.cli
import softattn_lm.commands.train
import softattn_lm.training.run  # noqa: F401
from softattn_lm.config.check import check
from softattn_lm.config.compose import compose
from softattn_lm.config.tree import config_folder

for name in ("adamw", "muon"):
    check(compose("train", [f"optimizer={name}"], config_folder()), "TrainSettings")
