"""Rules between settings that no single annotation can state. Plain arithmetic on the config; no torch."""

from __future__ import annotations

from typing import Any

from softattn_lm.errors import UserError

BUDGETS = ("steps", "tokens", "epochs")

_AT_LEAST = {
    "seed": 0,
    "steps": 1,
    "tokens": 1,
    "batch_size": 1,
    "model.context": 1,
    "model.n_layer": 0,
    "model.n_head": 1,
    "model.n_kv_head": 1,
    "model.head_dim": 1,
    "model.d_model": 1,
    "model.mlp_width": 1,
    "mask.window": 1,
    "training.accumulate": 1,
    "training.val_every": 1,
    "training.log_every": 1,
    "training.sample_every": 0,
    "training.save_every": 0,
    "training.num_workers": 0,
    "trainer.num_nodes": 1,
    "max_new_tokens": 1,
    "temperature": 0,
    "top_k": 1,
    "n": 1,
}
_ABOVE_ZERO = ("lr", "epochs", "training.clip", "model.final_cap")
_FRACTIONS = {"top_p": 1.0, "min_p": 1.0, "model.dropout": 1.0}  # 0 ... largest


def check_rules(cfg: dict[str, Any]) -> None:
    """Raises UserError for the first rule that the config breaks."""
    _ranges(cfg)
    if "steps" in cfg:
        _budget(cfg)
        _batch(cfg)
    if isinstance(cfg.get("model"), dict):
        _heads(cfg["model"])


def _ranges(cfg: dict[str, Any]) -> None:
    for key, least in _AT_LEAST.items():
        value = _get(cfg, key)
        if value is not None and value < least:
            raise UserError(f"{key} must be at least {least}, but {value} came")
    for key in _ABOVE_ZERO:
        value = _get(cfg, key)
        if value is not None and not value > 0:
            raise UserError(f"{key} must be above 0, but {value} came")
    for key, most in _FRACTIONS.items():
        value = _get(cfg, key)
        if value is not None and not 0 <= value <= most:
            raise UserError(f"{key} must be between 0 and {most:g}, but {value} came")


def _budget(cfg: dict[str, Any]) -> None:
    given = [key for key in BUDGETS if cfg.get(key) is not None]
    if not given:
        raise UserError("no budget: give one of steps=, tokens=, epochs=")
    if len(given) > 1:
        raise UserError(f"{' and '.join(f'{key}={cfg[key]}' for key in given)} are both a budget; give one of them")


def _batch(cfg: dict[str, Any]) -> None:
    accumulate = _get(cfg, "training.accumulate") or 1
    devices, hosts = _get(cfg, "trainer.devices"), _get(cfg, "trainer.num_nodes") or 1
    ranks = devices * hosts if isinstance(devices, int) and devices > 0 else hosts
    if isinstance(devices, int) and devices < 1:
        raise UserError(f"trainer.devices must be at least 1, or auto for all, but {devices} came")
    parts = accumulate * ranks
    if cfg["batch_size"] % parts:
        upper = (cfg["batch_size"] // parts + 1) * parts
        raise UserError(
            f"batch_size={cfg['batch_size']} does not divide into {parts} parts "
            f"({ranks} devices x training.accumulate={accumulate}); type batch_size={upper}"
        )


def _heads(model: dict[str, Any]) -> None:
    d_model, n_head, head_dim = model.get("d_model"), model.get("n_head"), model.get("head_dim")
    if d_model is None or n_head is None:
        return
    if head_dim is None and d_model % n_head:
        divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
        closest = min(divisors, key=lambda n: abs(n - n_head))
        raise UserError(
            f"model.d_model={d_model} does not divide into model.n_head={n_head} heads; "
            f"type model.n_head={closest}, or give model.head_dim"
        )
    n_kv_head = model.get("n_kv_head") or n_head
    if n_head % n_kv_head:
        raise UserError(
            f"model.n_head={n_head} does not divide into model.n_kv_head={n_kv_head} groups; "
            f"type one of {', '.join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)}"
        )
    position = model.get("position")
    if isinstance(position, dict) and ".rotary." in str(position.get("_target_")):
        width = head_dim or d_model // n_head
        turned = round(width * (position.get("fraction") or 1.0))
        if turned % 2:
            raise UserError(
                f"position=rotary turns pairs of components, but {turned} of a head's {width} would turn; "
                "type an even model.head_dim, or another position"
            )


def _get(cfg: dict[str, Any], dotted: str) -> Any:
    value: Any = cfg
    for part in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value
