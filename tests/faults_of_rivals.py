"""Faults in the rivals of the softmax, in what stands around a kernel, and in what watches it. See mutations.py."""

from __future__ import annotations

from tests.fault import KERNELS, Fault, contract, formulas


def normalisers(name: str) -> str:
    return formulas("_normalisers", name)


def recurrences(name: str) -> str:
    return f"tests/test_recurrences.py::{name}"


NORMALISERS = [
    Fault(
        "a sigmoid is not shifted by its count",
        f"{KERNELS}/sigmoid.py",
        "torch.sigmoid(scores - n.log())",
        "torch.sigmoid(scores)",
        normalisers("test_a_sigmoid_is_shifted_by_the_log_of_what_is_visible"),
    ),
    Fault(
        "hidden keys count for a sigmoid",
        f"{KERNELS}/sigmoid.py",
        "n = visible.count().clamp_min(1).to(scores.dtype)",
        "n = torch.tensor(float(visible.total))",
        contract("sigmoid", "weights_are_proper"),
    ),
    Fault(
        "a squared score is not squared",
        f"{KERNELS}/relu.py",
        "if self.power == 2:",
        "if self.power == 3:",
        normalisers("test_a_rectified_score_is_divided_by_what_is_visible_and_its_square_as_well"),
    ),
    Fault(
        "relu is divided by the length",
        f"{KERNELS}/relu.py",
        "a / visible.count().clamp_min(1).to(a.dtype)",
        "a / visible.total",
        contract("relu", "weights_are_proper"),
    ),
    Fault(
        "the second softmax is added",
        f"{KERNELS}/differential.py",
        "        return first - self.share().to(q.dtype) * second\n\n    def forward",
        "        return first + self.share().to(q.dtype) * second\n\n    def forward",
        normalisers("test_a_second_softmax_is_subtracted_with_its_share"),
    ),
    Fault(
        "fused halves are the first and the last components",
        f"{KERNELS}/differential.py",
        "even = (torch.arange(q.shape[-1], device=q.device) % 2 == 0).to(q.dtype)",
        "even = (torch.arange(q.shape[-1], device=q.device) < q.shape[-1] // 2).to(q.dtype)",
        contract("differential", "fast_equals_weights"),
    ),
    Fault(
        "each of two softmaxes drops its own weights",
        f"{KERNELS}/differential.py",
        "if self.training and self.dropout:",
        "if False:",
        contract("differential", "dropout_is_for_training"),
    ),
    Fault(
        "differential: layers count from 1",
        f"{KERNELS}/differential.py",
        "math.exp(-0.3 * layer)",
        "math.exp(-0.3 * (layer + 1))",
        normalisers("test_the_share_starts_at_what_its_layer_says_and_the_gain_is_the_rest"),
    ),
    Fault(
        "forgetting: a key fades by its own gate",
        f"{KERNELS}/forgetting.py",
        "theirs = self.sums[..., self.past :][..., queries], self.sums[..., keys]",
        "theirs = self.sums[..., self.past :][..., queries], self.sums.roll(1, -1)[..., keys]",
        normalisers("test_a_key_fades_by_what_every_later_token_keeps"),
    ),
    Fault(
        "forgetting: sums in float32",
        f"{KERNELS}/forgetting.py",
        'torch.float32 if features.device.type == "mps" else torch.float64',
        "torch.float32",
        normalisers("test_two_thousand_tokens_in_float32_are_as_precise_as_their_scores"),
    ),
    Fault(
        "forgetting: every row has the documents of the first",
        f"{KERNELS}/forgetting.py",
        "sums[row], of_rows(visible, row)",
        "sums[row], of_rows(visible, slice(0, 1))",
        normalisers("test_tiles_give_the_values_and_gradients_of_the_formula"),
    ),
    Fault(
        "forgetting: the bias is lost",
        f"{KERNELS}/forgetting.py",
        "return decay + added.repeat(decay.shape[-3] // added.shape[0], 1, 1)",
        "return decay",
        contract("forgetting", "bias_is_honoured"),
    ),
]
STATES = [
    Fault(
        "the delta rule adds in the place of replacing",
        f"{KERNELS}/delta.py",
        "u = written[:, :, n] - reread[:, :, n] @ memory",
        "u = written[:, :, n]",
        recurrences("test_a_key_written_twice_returns_the_last_value"),
    ),
    Fault(
        "within a chunk the delta rule adds",
        f"{KERNELS}/delta.py",
        "solved = torch.linalg.solve_triangular(overlaps, sides,",
        "solved = torch.linalg.solve_triangular(0 * overlaps, sides,",
        recurrences("test_a_key_written_twice_returns_the_last_value"),
    ),
    Fault(
        "a state is not forgotten from chunk to chunk",
        f"{KERNELS}/delta.py",
        "memory = since[:, :, n, -1:] * memory + to_end",
        "memory = memory + to_end",
        recurrences("test_a_gate_forgets_before_it_writes"),
    ),
    Fault(
        "a gate forgets what its own token writes",
        f"{KERNELS}/delta.py",
        ".tril(-1).cumsum(-2)",
        ".tril().cumsum(-2)",
        recurrences("test_a_gate_forgets_before_it_writes"),
    ),
    Fault(
        "a decay is a ratio of two products",
        f"{KERNELS}/delta.py",
        "between = log_alpha.expand(*log_alpha.shape[:-1], c).tril(-1).cumsum(-2)",
        "between = log_alpha.cumsum(-2) - log_alpha.cumsum(-2).mT",
        recurrences("test_decays_whose_ratio_no_float_can_hold_are_exact"),
    ),
    Fault(
        "a chunk reads its own tokens in the state as well",
        f"{KERNELS}/linear.py",
        "q @ values[:, :, :-1]",
        "q @ values[:, :, 1:]",
        contract("linear", "fast_equals_weights"),
    ),
    Fault(
        "the normaliser of linear attention misses what is carried over",
        f"{KERNELS}/linear.py",
        " + q @ keys[:, :, :-1, :, None]",
        "",
        recurrences("test_a_state_carries_everything_over_from_the_text_before[linear-1]"),
    ),
    Fault(
        "delta: keys are as long as they come",
        f"{KERNELS}/delta.py",
        "k = F.normalize(precise(k), dim=-1)",
        "k = precise(k)",
        recurrences("test_a_key_written_twice_returns_the_last_value"),
    ),
    Fault(
        "decoding in parts starts from an empty state",
        f"{KERNELS}/delta.py",
        'memory = None if state is None else state["memory"]',
        "memory = None",
        contract("delta", "recurrence_equals_forward"),
    ),
]
