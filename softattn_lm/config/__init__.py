"""From a word on the command line to a checked, plain config. Nothing here imports torch; `build` imports what it builds."""
