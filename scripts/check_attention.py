"""softattn check_attention: `python scripts/check_attention.py --help`."""

from softattn_lm.cli import main

if __name__ == "__main__":
    main("check_attention")
