"""softattn benchmark: `python scripts/benchmark.py --help`."""

import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1:] == ["gpu"]:  # which needs torch and lightning only, not even to be installed, and composes nothing
        if find_spec("softattn_lm") is None:
            sys.path.append(str(Path(__file__).resolve().parents[1]))
        from softattn_lm.cli import answer
        from softattn_lm.commands.benchmark_gpu import main as gpu

        answer(gpu)
    else:
        from softattn_lm.cli import main

        main("benchmark")
