"""softattn benchmark: `python scripts/benchmark.py --help`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:] == ["gpu"]:  # which needs torch and lightning only, and composes nothing
        from softattn_lm.cli import answer
        from softattn_lm.commands.benchmark_gpu import main as gpu

        answer(gpu)
    else:
        from softattn_lm.cli import main

        main("benchmark")
