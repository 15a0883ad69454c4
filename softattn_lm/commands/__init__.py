"""One module per command, named as its yaml in configs/ and its script in scripts/.

Each has `run(cfg, words)`: `cfg` is the composed and checked plain config, `words` are the positional words as typed
(a prompt, runs). `train.run(cfg, words, overrides)` also gets the overrides that the person typed ("steps=2000",
"logger=wandb"; raw values as typed), so that resuming can tell what was asked for from what is a default.
A module is imported only after its config was checked. This table imports no torch.
"""

from softattn_lm.config.argv import Command

COMMANDS = {
    command.name: command
    for command in (
        Command(
            "train",
            "TrainSettings",
            words="none",
            raw=frozenset({"data.path", "data.name", "tokenizer.path", "name", "runs", "resume"}),
            sweeps=True,
        ),
        Command("sample", "SampleSettings", words="prompt", raw=frozenset({"file", "runs", "checkpoint"})),
        Command("evaluate", "EvaluateSettings", words="runs", raw=frozenset({"text", "file", "runs", "checkpoint"})),
        Command(
            "prepare_data",
            "PrepareSettings",
            words="none",
            raw=frozenset({"data.path", "data.name", "tokenizer.path", "runs"}),
        ),
    )
}
