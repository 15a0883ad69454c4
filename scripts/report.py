"""softattn report: `python scripts/report.py --help`."""

from softattn_lm.cli import main

if __name__ == "__main__":
    main("report")
