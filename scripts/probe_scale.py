"""softattn probe_scale: `python scripts/probe_scale.py --help`."""

from softattn_lm.cli import main

if __name__ == "__main__":
    main("probe_scale")
