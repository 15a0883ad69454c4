"""From a word on the command line to a checked, plain config. Only `build` imports torch, with what it builds."""
