"""softattn prepare_data: `python scripts/prepare_data.py --help`."""

from softattn_lm.cli import main

if __name__ == "__main__":
    main("prepare_data")
