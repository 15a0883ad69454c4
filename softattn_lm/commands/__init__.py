"""One module per command, named as its yaml in configs/ and its script in scripts/.

Each has `run(cfg, words)`: `cfg` is the composed and checked plain config, `words` are the positional words as typed
(a prompt, runs). `train.run(cfg, words, overrides)` also gets the overrides that the person typed ("steps=2000",
"logger=wandb"; raw values as typed), so that resuming can tell what was asked for from what is a default.
A module is imported only after its config was checked. This table imports no torch.
"""

from softattn_lm.config.argv import Command

_DATA = frozenset({"data.path", "data.name", "data.validation_sets.", "tokenizer.path", "runs"})
_CODE = frozenset({"attention.target", "trust"})
_RUN = frozenset({"runs", "checkpoint", "file", "trust"})

COMMANDS = {
    command.name: command
    for command in (
        Command("train", "TrainSettings", words="none", raw=_DATA | _CODE | {"name", "resume", "fork"}, sweeps=True),
        Command("sample", "SampleSettings", words="prompt", raw=_RUN),
        Command("evaluate", "EvaluateSettings", words="runs", raw=_RUN | {"text"}),
        Command("telemetry", "TelemetrySettings", words="runs", raw=frozenset({"runs", "figure"})),
        Command("probe_scale", "ProbeScaleSettings", words="runs", raw=frozenset({"runs", "checkpoint", "trust"})),
        Command("prepare_data", "PrepareSettings", words="none", raw=_DATA),
        Command("check_attention", "CheckAttentionSettings", words="none", raw=_CODE | {"callable"}),
        Command("benchmark", "BenchmarkSettings", words="topic", raw=frozenset({"runs", "text"})),
        Command(
            "ablate",
            "AblateSettings",
            words="question",
            raw=_DATA | _CODE | {"name", "question", "hypothesis", "save_as"},
            passes_on="train",
        ),
        Command("report", "ReportSettings", words="runs", raw=frozenset({"runs"})),
    )
}
