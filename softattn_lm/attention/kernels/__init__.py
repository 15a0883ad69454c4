"""One file per variant; its formula and source stand on its first lines."""
