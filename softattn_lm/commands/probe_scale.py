"""probe_scale: what the factor on q kᵀ does. Without a run: the soft dictionary, drawn queries, blocks at their start.
With runs: each layer of each of them, as it is and as it would be under every other scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from softattn_lm.config.settings import ProbeScaleSettings, section
from softattn_lm.errors import UserError, writing
from softattn_lm.own_files import require_own_files
from softattn_lm.runs.files import write_json
from softattn_lm.runs.find import find_run
from softattn_lm.runs.names import run_name, runs_folder
from softattn_lm.runs.new import made_folder

if TYPE_CHECKING:
    from softattn_lm.model.parameters import InitKind

BETAS = (0.5, 1, 2, 4, 8, 12, 16, 24, 32)


def run(cfg: dict[str, Any], words: list[str]) -> None:
    """`words`: runs; none is the theory. Raises UserError for a run that is not there or sizes that are none."""
    settings = section(ProbeScaleSettings, cfg)
    for name in ("keys", "rows", "d_model"):
        if getattr(settings, name) < 2:
            raise UserError(f"{name}={getattr(settings, name)} is too few; type {name}=2 or more")
    if not settings.d_k or min(settings.d_k) < 1:
        raise UserError(f"d_k={settings.d_k} must be widths of 1 or more, such as d_k=[64,128]")
    folders = [find_run(word, settings.runs) for word in words]
    if not folders:
        _theory(settings)
    for folder in folders:
        require_own_files(folder)
    for folder in folders:
        _trained(folder, settings)


def _theory(settings: ProbeScaleSettings) -> None:
    from softattn_lm.commands.probe_scale_figure import draw
    from softattn_lm.commands.probe_scale_table import show_blocks, show_dictionary, show_drawn

    folder = made_folder(runs_folder(settings.runs) / "probe_scale")  # before anything is computed
    found = {"dictionary": dictionary(settings), "drawn": drawn(settings), "blocks": blocks(settings)}
    show_dictionary(found["dictionary"], settings.keys)
    show_drawn(found["drawn"], settings.keys)
    show_blocks(found["blocks"], settings.d_model)
    files = [folder / "probe_scale.png", folder / "probe_scale.svg"]
    write_json(folder / "probe_scale.json", found)
    with writing(files[0]):
        draw(found, settings.keys, files)
    print("What takes training, recall and text with and without a scale, is not measured here.")
    print(f"figure: {', '.join(map(str, files))}; figures as numbers: {folder / 'probe_scale.json'}")


def _trained(folder: Path, settings: ProbeScaleSettings) -> None:
    from softattn_lm.commands.probe_scale_table import show_layers

    rows = layers(folder, settings)
    show_layers(rows, run_name(folder, settings.runs))
    write_json(folder / "probe_scale.json", rows)
    print(f"figures as numbers: {folder / 'probe_scale.json'}")


def scale_policies(d_k: int, n_keys: int) -> dict[str, float]:
    """The factor that each shipped policy starts with at a query of `n_keys` keys; equal ones share an entry, their
    names joined.
    """
    import yaml

    from softattn_lm.attention.visibility import Visibility
    from softattn_lm.config.build import build
    from softattn_lm.config.tree import choices, config_folder
    from softattn_lm.model.block import make

    names: dict[float, list[str]] = {}
    for name in choices(config_folder(), "scale"):
        node = yaml.safe_load((config_folder() / "scale" / f"{name}.yaml").read_text(encoding="utf-8"))
        policy = make(build(node), head_dim=d_k, n_head=1, context=n_keys)
        scale = policy(Visibility(n_keys))
        value = scale if isinstance(scale, float) else float(scale.detach().flatten()[-1])
        same = next((known for known in names if abs(known - value) < 1e-6 * value), value)
        names.setdefault(same, []).append(name)
    return {", ".join(those): value for value, those in names.items()}


def dictionary(settings: ProbeScaleSettings) -> list[dict[str, Any]]:
    """A row per temperature: β/T, value error and its bound, weight of the best match, its floor, and with a tie."""
    from softattn_lm.evaluation.scale_law import soft_dictionary

    rows = []
    for beta in BETAS:
        one, tied = (soft_dictionary(beta, n=settings.keys, d=settings.keys, tied=tie) for tie in (False, True))
        rows.append({"beta": beta, **vars(one), "tied_p_max": tied.p_max})
    return rows


def drawn(settings: ProbeScaleSettings) -> list[dict[str, Any]]:
    """A row per width and scale: queries and keys of N(0, 1) components."""
    import torch

    from softattn_lm.evaluation.scale_law import draw_rows, weighed_rows

    rows = []
    for d_k in settings.d_k:
        drawing = draw_rows(d_k, settings.keys, settings.rows, settings.seed)
        for name, scale in scale_policies(d_k, settings.keys).items():
            scores = scale * drawing.scores()
            weights = torch.softmax(scores, -1)
            figures = vars(weighed_rows(scores, weights))
            gradients = {f"gradient_{key}": value for key, value in vars(drawing.gradients(scale, weights)).items()}
            law = {"logit_std_law": scale * d_k**0.5}
            rows.append({"d_k": d_k, "scale": name, "factor": scale, **law, **figures, **gradients})
    return rows


def blocks(settings: ProbeScaleSettings) -> list[dict[str, Any]]:
    """A row per initialisation, width and scale: scores of untrained blocks, beside the law."""
    import torch

    from softattn_lm.evaluation.scale_in_models import scores_at_start
    from softattn_lm.evaluation.scale_law import block_std, weighed_rows

    rows = []
    deviations: dict[InitKind, float] = {"fan_in": settings.d_model**-0.5, "gpt2": 0.02}
    for init, std in deviations.items():
        for d_k in settings.d_k:
            dots = scores_at_start(d_k, settings.d_model, settings.keys, init, settings.seed)
            for name, scale in scale_policies(d_k, settings.keys).items():
                figures = vars(weighed_rows(scale * dots, torch.softmax(scale * dots, -1)))
                law = {"logit_std_law": scale * block_std(d_k, settings.d_model, std, std)}
                rows.append({"init": init, "d_k": d_k, "scale": name, "factor": scale, **law, **figures})
    return rows


def layers(folder: Path, settings: ProbeScaleSettings) -> list[dict[str, Any]]:
    """A row per layer for the scale that the run has, and one for what its kernel would make of the same q and k under
    each policy; none of those, and no figures of scores, where the kernel reads none.
    """
    from softattn_lm.data import prepared_for
    from softattn_lm.evaluation.scale_in_models import scores_of_model
    from softattn_lm.evaluation.scale_law import weighed_rows
    from softattn_lm.training.checkpoint import load_run

    loaded = load_run(folder, settings.checkpoint)
    prepared = prepared_for(loaded.config, runs_folder(settings.runs) / "cache")
    held_back = prepared.splits["validation"]
    split = held_back if held_back.n_tokens > 1 else prepared.splits["train"]
    rows = []
    for layer, found in enumerate(scores_of_model(loaded.model, split.tokens, scale_policies)):
        arms = {"its own": (found.scale * found.dots, found.weights)}
        arms |= {name: (factor * found.dots, weights) for name, (factor, weights) in found.others.items()}
        for name, (scores, weights) in arms.items():
            figures = vars(weighed_rows(scores.flatten(0, 1), weights.flatten(0, 1), found.rows_sum_to))
            known = {"law": None, "bound": None, "logit_abs_max": scores.abs().max().item()}
            if not found.reads_scores:
                known["logit_abs_max"] = figures["logit_std"] = None
            elif name == "its own":
                known |= {"law": found.law, "bound": found.bound}
            rows.append({"layer": layer, "kernel": found.kernel, "scale": name, **known, **figures})
    return rows
