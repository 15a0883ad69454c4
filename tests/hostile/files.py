"""Checkpoint files of a stranger, each made of a good one: what is wrong with it is its name."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.hostile.nodes import Reduces

Saved = dict[str, Any]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def laughs() -> Any:
    """Thirty lists, the last of which stands for 10^30 values."""
    value: Any = ["ha"] * 10
    for _ in range(30):
        value = [value] * 10
    return value


def edits() -> dict[str, Callable[[Saved], object]]:
    """Name -> a change in place of what torch.load gave. None of the results may load."""

    def model(**values: Any) -> Callable[[Saved], object]:
        return lambda saved: saved["softattn"]["config"]["model"].update(values)

    def own(**values: Any) -> Callable[[Saved], object]:
        return lambda saved: saved["softattn"].update(values)

    def tokenizer(**values: Any) -> Callable[[Saved], object]:
        return own(tokenizer=values)

    def weight(change: Callable[[Any], Any]) -> Callable[[Saved], object]:
        def edit(saved: Saved) -> None:
            saved["state_dict"]["model.embed.weight"] = change(saved["state_dict"]["model.embed.weight"])

        return edit

    def without(*path: str) -> Callable[[Saved], object]:
        def edit(saved: Saved) -> None:
            node = saved
            for key in path[:-1]:
                node = node[key]
            del node[path[-1]]

        return edit

    return {
        "an interpolation": model(norm="${oc.env:HOME}"),
        "an interpolation in a list": model(smear=["${oc.env:HOME}"]),
        "an interpolation outside the model": lambda saved: saved["softattn"]["config"].update(lr="${oc.env:HOME}"),
        "a key of Hydra": model(_recursive_=False),
        "a key that is a number": lambda saved: saved["softattn"]["config"].update({3: 4}),
        "nested a hundred deep": model(smear=deep(100)),
        "more values than memory holds": model(smear=laughs()),
        "a tensor for a number": model(d_model=torch.tensor(16)),
        "a width of ten to the ninth": model(d_model=10**9),
        "a width of 4096": model(d_model=4096),
        "a thousand million layers": model(n_layer=10**9),
        "a context without end": model(context=10**12),
        "a context without end in a model without a table": lambda saved: saved["softattn"]["config"]["model"].update(
            position={"_target_": "softattn_lm.position.none.NoPosition", "_partial_": True}, context=10**9
        ),
        "a negative width": model(d_model=-16),
        "no heads": model(n_head=0),
        "a dropout that is no number": model(dropout=float("nan")),
        "a text for a number": model(n_layer="2"),
        "no context": without("softattn", "config", "model", "context"),
        "no mask": without("softattn", "config", "model", "mask"),
        "no model": without("softattn", "config", "model"),
        "no config": without("softattn", "config"),
        "no tokenizer": without("softattn", "tokenizer"),
        "no step": without("softattn", "step"),
        "no data": without("softattn", "data"),
        "a partial model": model(_partial_=True),
        "an attention that is not partial": lambda saved: saved["softattn"]["config"]["model"]["attention"].update(
            _partial_=False
        ),
        "a negative step": own(step=-1),
        "a step that is true": own(step=True),
        "a config that is a list": own(config=[1]),
        "a data source that is a number": own(data={"fingerprint": "x", "source": 3}),
        "a tokenizer of another kind": tokenizer(kind="os.system"),
        "a tokenizer whose kind is a list": tokenizer(kind=["char"]),
        "a tokenizer with a target": tokenizer(kind="char", unknown={"_target_": "builtins.open"}, characters="ab"),
        "a tokenizer with numbers for characters": tokenizer(kind="char", unknown="error", characters=[1, 2]),
        "a tokenizer with a character twice": tokenizer(kind="char", unknown="error", characters="aab"),
        "a tokenizer of more characters": tokenizer(
            kind="char", unknown="error", characters="".join(map(chr, range(97, 9999)))
        ),
        "a tokenizer that is no json": tokenizer(kind="bpe", vocab_size=300, json="{"),
        "a tokenizer of json that is none": tokenizer(kind="pretrained", json=7),
        "a tokenizer nested deep": tokenizer(kind="pretrained", json="[" * 100_000),
        "no weights": lambda saved: saved.update(state_dict={}),
        "weights that are a list": lambda saved: saved.update(state_dict=[1]),
        "a weight that is a text": weight(lambda _: "x"),
        "a weight of another shape": weight(lambda w: w[:, :-1].clone()),
        "a weight that repeats one number": weight(lambda w: torch.zeros(1).expand(w.shape)),
        "a sparse weight": weight(lambda w: w.to_sparse()),
        "a weight that is nowhere": weight(lambda w: w.to("meta")),
        "a weight too many": lambda saved: saved["state_dict"].update({"model.extra": torch.zeros(3)}),
        "another format": own(format=[1]),
    }


def training_edits() -> dict[str, Callable[[Saved], object]]:
    """Name -> a change of what only training reads: such a file is sampled from, and not continued or forked."""

    def own(**values: Any) -> Callable[[Saved], object]:
        return lambda saved: saved["softattn"].update(values)

    def state(change: Callable[[dict[str, Any]], object]) -> Callable[[Saved], object]:
        """Of the first parameter that has one."""
        return lambda saved: change(next(iter(saved["optimizer_states"][0]["state"].values())))

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Saved], object]:
        return state(lambda entries: entries.update({key: change(value) for key, value in entries.items()}))

    return {
        "no seconds": lambda saved: saved["softattn"].pop("seconds"),
        "seconds that are a text": own(seconds="1"),
        "no best": lambda saved: saved["softattn"].pop("best"),
        "a best that is a list": own(best=[1]),
        "a best loss that is a text": own(best={"loss": "low", "step": 2}),
        "a parent without a step": own(parent="a"),
        "no loops": lambda saved: saved.pop("loops"),
        "empty loops": lambda saved: saved.update(loops={}),
        "a loop without its counters": lambda saved: saved["loops"]["fit_loop"].update(epoch_progress={}),
        "another version of lightning": lambda saved: saved.update({"pytorch-lightning_version": "none"}),
        "a step that is a lie": own(step=1),
        "no optimizer": lambda saved: saved.pop("optimizer_states"),
        "no optimizer in the list": lambda saved: saved.update(optimizer_states=[]),
        "an optimizer that is empty": lambda saved: saved.update(optimizer_states=[{}]),
        "an optimizer without its state": lambda saved: saved["optimizer_states"][0].update(state={}),
        "momentum of another shape": each(lambda value: torch.zeros(7)),
        "momentum that is nowhere": each(lambda value: value.to("meta")),
        "momentum that is a text": state(lambda entries: entries.update(momentum="x", exp_avg="x")),
        "a rate that is a text": lambda saved: saved["optimizer_states"][0]["param_groups"][0].update(lr="fast"),
        "groups of other parameters": lambda saved: saved["optimizer_states"][0]["param_groups"].pop(),
        "a weight too many": lambda saved: saved["state_dict"].update({"model.extra": torch.zeros(3)}),
    }


def files(good: bytes, canary: Path) -> dict[str, bytes]:
    """Name -> the bytes of a file that is no checkpoint, or not a whole one."""
    saved = torch.load(io.BytesIO(good), weights_only=True)
    return {
        "a pickle that runs code": pickle.dumps(Reduces(canary)),
        "a checkpoint that runs code": zipped(saved | {"extra": Reduces(canary)}),
        "a checkpoint that runs code in its config": zipped(
            saved | {"softattn": saved["softattn"] | {"config": Reduces(canary)}}
        ),
        "packed": repacked(good, zipfile.ZIP_DEFLATED, lambda name, data: data),
        "another pickle inside": repacked(
            good,
            zipfile.ZIP_STORED,
            lambda name, data: pickle.dumps(Reduces(canary), 2) if name.endswith("data.pkl") else data,
        ),
        "another pickle of another protocol inside": repacked(
            good, zipfile.ZIP_STORED, lambda name, data: pickle.dumps([1], 5) if name.endswith("data.pkl") else data
        ),
        "half": good[: len(good) // 2],
        "without its end": good[:-30],
        "nothing": b"",
        "one bit": flipped(good, good.index(saved["state_dict"]["model.embed.weight"].numpy().tobytes())),
        "words": b"this is no checkpoint",
    }


def zipped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def repacked(good: bytes, how: int, change: Callable[[str, bytes], bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return file.getvalue()


def flipped(data: bytes, place: int, bit: int = 0) -> bytes:
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]
