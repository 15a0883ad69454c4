"""Tokens per second and model FLOPs utilisation of a run.

    MFU = tokens/s · operations per token / (devices · peak)

Operations per token are those of `describe`: 6 per weight used in a product, and attention over the keys that are read.
peak: dense operations per second in bfloat16 that the maker states for the device, NVIDIA's data sheets without
sparsity. Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Words of a device's name -> operations per second in bfloat16. The first that fits counts.
PEAKS = {
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Of one device; None where its maker's figure is not listed here."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """None for a part of a device (MIG), too."""
    words = f" {name.replace('-', ' ')} "
    return None if " MIG " in words else next((peak for part, peak in PEAKS.items() if f" {part} " in words), None)


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float, devices: int = 1) -> float:
    """MFU, a fraction."""
    return tokens_per_second * flops_per_token / (devices * peak)


@dataclass
class Throughput:
    """What rows of metrics.jsonl say about speed since the row before that said it. Arithmetic on times that are taken
    anyway: nothing waits for the device.

    flops_per_token: see `describe`. peak: of one device, None where it is not known, as of every CPU, whose rate
    depends on what else it does: then there is no MFU.
    """

    tokens_per_step: int
    flops_per_token: float
    peak: float | None
    devices: int = 1
    step: int = 0  # and seconds of training, where the last figures end
    seconds: float = 0.0

    def figures(self, step: int, seconds: float) -> dict[str, Any]:
        """{"tokens_per_second", "mfu"} since the last call; {} where no time passed."""
        steps, spent = step - self.step, seconds - self.seconds
        self.step, self.seconds = step, seconds
        return {} if steps <= 0 or spent <= 0 else self.of(steps * self.tokens_per_step / spent)

    def of(self, tokens_per_second: float) -> dict[str, Any]:
        """mfu is left out where the peak is not known."""
        found = {"tokens_per_second": round(tokens_per_second, 1)}
        if self.peak is not None:
            found["mfu"] = round(utilisation(tokens_per_second, self.flops_per_token, self.peak, self.devices), 4)
        return found
