"""Faults in the rivals of the softmax, in what stands around a kernel, and in what watches it. See mutations.py."""

from __future__ import annotations

from tests.fault import ATTENTION, KERNELS, MODEL, Fault, contract, formulas


def normalisers(name: str) -> str:
    return formulas("_normalisers", name)


def recurrences(name: str) -> str:
    return f"tests/test_recurrences.py::{name}"


def parts(name: str) -> str:
    return f"tests/test_block_parts.py::{name}"


def states(name: str) -> str:
    return f"tests/test_recurrent_layers.py::{name}"


def latent(name: str) -> str:
    return f"tests/test_latent.py::{name}"


def telemetry(name: str) -> str:
    return f"tests/test_telemetry.py::{name}"


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
PARTS = [
    Fault(
        "a convolution reads the token behind",
        f"{ATTENTION}/cache.py",
        "F.pad(x, (0, 0, count, 0))",
        "F.pad(x, (0, 0, 0, count))",
        parts("test_the_convolution_adds_earlier_tokens_by_their_weights"),
    ),
    Fault(
        "a convolution reaches into another document",
        f"{ATTENTION}/convolution.py",
        "(places >= back)",
        "(places >= 0)",
        parts("test_the_convolution_starts_again_with_every_document"),
    ),
    Fault(
        "a convolution forgets the prompt while decoding",
        f"{ATTENTION}/convolution.py",
        "behind(x, len(weight) - 1, name, cache)",
        "behind(x, len(weight) - 1, name, None)",
        parts("test_the_convolution_goes_on_where_an_earlier_call_ended"),
    ),
    Fault(
        "K = V in the cache: stored once although v is mixed",
        f"{ATTENTION}/block.py",
        "self.convolution is None and self.mix is None",
        "self.convolution is None",
        parts("test_decoding_equals_the_full_pass_with_every_part_position_and_mask[SharedKV-first values]"),
    ),
    Fault(
        "values are mixed with those of the layer before",
        f"{MODEL}/decoder.py",
        "first = values if first is None else first",
        "first = values",
        parts("test_every_layer_mixes_in_the_values_of_the_first_and_of_no_other"),
    ),
    Fault(
        "a gate without its sigmoid",
        f"{ATTENTION}/block.py",
        "self.gate(x).sigmoid()",
        "self.gate(x)",
        parts("test_a_head_is_multiplied_by_its_gate_and_an_element_by_its_own"),
    ),
    Fault(
        "a state is not carried beyond the first call",
        f"{ATTENTION}/cache.py",
        "        self._states[layer] = state\n",
        "        self._states.setdefault(layer, state)\n",
        states("test_decoding_from_a_state_equals_the_full_pass_far_beyond_the_context"),
    ),
    Fault(
        "a state has the window of its context",
        f"{MODEL}/decoder.py",
        "visible = shared if recurrent else mask.visibility(shared, self.context)",
        "visible = mask.visibility(shared, self.context)",
        states("test_the_scale_of_the_length_counts_all_tokens_a_state_has_read"),
    ),
    Fault(
        "the gain behind a head's norm is dropped",
        f"{ATTENTION}/block.py",
        "self.head_norm(y) * self.kernel.head_gain",
        "self.head_norm(y)",
        states("test_the_norm_of_a_head_stands_behind_its_kernel_and_takes_its_gain"),
    ),
    Fault(
        "latent: the whole head's frequencies turn its part",
        f"{MODEL}/block.py",
        'return {"head_dim": width}',
        "return {}",
        latent("test_a_rotation_turns_the_shared_part_and_nothing_else"),
    ),
    Fault(
        "latent: keys made from the cache are not turned",
        f"{ATTENTION}/block.py",
        "return q, _turned(self.k_norm(k), given.key_rotation), v if",
        "return q, self.k_norm(k), v if",
        latent("test_decoding_from_latents_equals_the_full_pass"),
    ),
    Fault(
        "latent: the part that turns stands behind the rest in keys",
        f"{ATTENTION}/latent.py",
        "torch.cat((rotary.expand(-1, self.n_kv_head, -1, -1), k), dim=-1), v",
        "torch.cat((k, rotary.expand(-1, self.n_kv_head, -1, -1)), dim=-1), v",
        latent("test_latent_by_hand"),
    ),
]
INSIDE = [
    Fault(
        "induction is read off the token itself, not off the one behind it",
        "softattn_lm/evaluation/telemetry.py",
        "diagonal(1 - probe.half, -2, -1)[..., 1 : probe.half + 1]",
        "diagonal(-probe.half, -2, -1)[..., : probe.half]",
        telemetry("test_the_induction_score_is_the_weight_behind_the_earlier_occurrence_of_the_token"),
    ),
    Fault(
        "rows that read one key count as sharp",
        "softattn_lm/evaluation/telemetry.py",
        "rows = count > 1",
        "rows = count > 0",
        telemetry("test_the_figures_of_three_rows_worked_out_by_hand"),
    ),
    Fault(
        "a probe turns dropout on in parts that were frozen",
        "softattn_lm/evaluation/watching.py",
        "            part.training = mode\n",
        "            part.training = True\n",
        telemetry("test_a_probe_leaves_mode_gradients_hooks_and_random_numbers_alone"),
    ),
    Fault(
        "hidden keys count as logits",
        "softattn_lm/evaluation/telemetry.py",
        "logits, seen_by_row = seen.logits()[:n_text], readable & rows[..., None]",
        "logits, seen_by_row = seen.logits()[:n_text], readable | rows[..., None]",
        telemetry("test_the_figures_of_three_rows_worked_out_by_hand"),
    ),
    Fault(
        "the law of a block forgets the root",
        "softattn_lm/evaluation/scale_law.py",
        "math.sqrt(d_k) * d_model",
        "d_k * d_model",
        "tests/test_probe_scale.py::test_a_block_starts_with_the_standard_deviation_of_the_law",
    ),
]
