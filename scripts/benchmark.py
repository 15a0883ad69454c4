"""softattn benchmark: `python scripts/benchmark.py --help`."""

from softattn_lm.cli import main

if __name__ == "__main__":
    main("benchmark")
