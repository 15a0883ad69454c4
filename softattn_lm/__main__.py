"""`python -m softattn_lm train ...` is `softattn train ...`."""

from softattn_lm.cli import main

if __name__ == "__main__":
    main()
