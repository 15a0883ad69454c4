"""Faults that attention code really has, and for each the test that must notice it. See tests/mutations.py."""

from __future__ import annotations

from tests.fault import ATTENTION, KERNELS, MODEL, POSITION, Fault, contract, formulas
from tests.faults_of_decoding import DECODING
from tests.faults_of_rivals import INSIDE, NORMALISERS, PARTS, STATES


def blockwise(name: str) -> str:
    return f"tests/test_blockwise.py::{name}"


LINEAR_EQUALS = "test_y_and_every_gradient_are_rounded_about_as_torchs_own"
BLOCKWISE_EQUALS = "test_values_and_all_gradients_equal_the_formula_at_lengths_around_blocks"
MASKS = [
    Fault(
        "the window is one key too wide",
        f"{ATTENTION}/visibility.py",
        "else distance < self.window",
        "else distance <= self.window",
        formulas("_masks", "test_a_window_of_two_reads_two_keys_itself_included"),
    ),
    Fault(
        "one token of the future is read",
        f"{ATTENTION}/visibility.py",
        "readable = distance >= 0",
        "readable = distance >= -1",
        contract("formula", "future_is_invisible"),
    ),
    Fault(
        "the future is read while decoding only",
        f"{ATTENTION}/visibility.py",
        "readable = distance >= 0",
        "readable = distance >= -self.past",
        contract("formula", "future_is_invisible"),
    ),
    Fault(
        "torch's is_causal with cached keys",
        f"{ATTENTION}/visibility.py",
        "return self.past == 0 and not self.cuts",
        "return not self.cuts",
        contract("sdpa", "cached_equals_full"),
    ),
    Fault(
        "a window is ignored by the fused kernel",
        f"{ATTENTION}/visibility.py",
        "return self.past == 0 and not self.cuts and",
        "return self.past == 0 and",
        contract("sdpa", "fast_equals_weights"),
    ),
    Fault(
        "a window is ignored by the fused kernel while decoding",
        f"{ATTENTION}/visibility.py",
        "return self.new == 1 and not self.cuts and",
        "return self.new == 1 and",
        contract("sdpa", "fast_equals_weights"),
    ),
    Fault(
        "an earlier document is read",
        f"{ATTENTION}/visibility.py",
        "(mine[:, :, None] == theirs[:, None, :])",
        "(mine[:, :, None] >= theirs[:, None, :])",
        contract("formula", "documents_are_apart"),
    ),
    Fault(
        "padding is read",
        f"{ATTENTION}/visibility.py",
        " & (theirs >= 0)[:, None, :]",
        "",
        formulas("_masks", "test_documents_read_themselves_only_and_padding_reads_nothing"),
    ),
    Fault(
        "sinks of the row and not of the document",
        f"{ATTENTION}/visibility.py",
        "self.places[:, None, keys] < self.sinks",
        "self.key_positions[keys] < self.sinks",
        formulas("_masks", "test_each_document_has_its_own_window_and_its_own_sinks"),
    ),
    Fault(
        "distances forget what the cache has dropped",
        f"{ATTENTION}/visibility.py",
        "dropped = 0 if self.start is None else self.start - self.past",
        "dropped = 0",
        contract("formula", "cached_equals_full_beyond_the_window"),
    ),
    Fault(
        "sinks count twice among what is visible",
        f"{ATTENTION}/visibility.py",
        "count = torch.arange(self.past + 1, self.total + 1, device=self.device)",
        "count = torch.arange(self.past + 1, self.total + 1, device=self.device) + self.sinks",
        formulas("_masks", "test_counts_and_shortcuts_agree_with_the_dense_mask"),
    ),
    Fault(
        "places of documents do not start again",
        f"{MODEL}/documents.py",
        "index - first + torch.where",
        "index + torch.where",
        contract("formula", "documents_are_apart"),
    ),
    Fault(
        "places of documents do not go on with the cache",
        f"{MODEL}/documents.py",
        'cache.fixed["place"] + 1, 0)',
        'cache.fixed["place"], 0)',
        formulas("_masks", "test_places_go_on_where_the_last_call_stopped"),
    ),
]
SOFTMAX = [
    Fault(
        "scale by C in the place of D",
        f"{MODEL}/decoder.py",
        "scale=make(scale, **shapes)",
        'scale=make(scale, **{**shapes, "head_dim": d_model})',
        "tests/test_model.py::test_logits_equal_gpt2_of_transformers",
    ),
    Fault(
        "a finite number for -inf",
        f"{KERNELS}/formula.py",
        "scores.masked_fill(~readable, -torch.inf)",
        "scores.masked_fill(~readable, -1e4)",
        contract("formula", "future_is_invisible"),
    ),
    Fault(
        "a row of nothing but -inf",
        f"{KERNELS}/formula.py",
        "if not visible.has_empty_rows:",
        "if True:",
        contract("formula", "empty_rows_give_zero"),
    ),
    Fault(
        "the cap comes after the bias",
        f"{KERNELS}/formula.py",
        """    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.tile().to(scores.dtype)
""",
        """    if bias is not None:
        scores = scores + bias.tile().to(scores.dtype)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
""",
        formulas("", "test_the_cap_is_on_scores_and_neither_on_the_bias_nor_on_the_mask"),
    ),
    Fault(
        "the cap comes after the mask",
        f"{KERNELS}/formula.py",
        "    scores = scores.masked_fill(~readable, -torch.inf)\n",
        "    scores = scores.masked_fill(~readable, -torch.inf)\n"
        "    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)\n",
        formulas("", "test_the_cap_is_on_scores_and_neither_on_the_bias_nor_on_the_mask"),
    ),
    Fault(
        "the sink is counted twice",
        f"{KERNELS}/formula.py",
        "torch.cat((scores, column), dim=-1), dim=-1, dtype=precise)[..., :-1]",
        "torch.cat((scores, column, column), dim=-1), dim=-1, dtype=precise)[..., :-2]",
        formulas("", "test_softmax_plus_one_adds_one_to_the_denominator"),
    ),
    Fault(
        "a learned sink does not learn",
        f"{KERNELS}/formula.py",
        "column = sink.to(scores.dtype)",
        "column = sink.detach().to(scores.dtype)",
        formulas("", "test_the_gradient_of_a_sink_is_what_the_row_gives_to_it"),
    ),
    Fault(
        "dropout in eval",
        f"{ATTENTION}/kernel.py",
        "F.dropout(a, self.dropout, self.training)",
        "F.dropout(a, self.dropout, True)",
        contract("formula", "dropout_is_for_training"),
    ),
    Fault(
        "dropout never",
        f"{ATTENTION}/kernel.py",
        "F.dropout(a, self.dropout, self.training)",
        "F.dropout(a, self.dropout, False)",
        contract("topk", "dropout_is_for_training"),
    ),
    Fault(
        "dropout in eval of the fused kernel",
        f"{KERNELS}/sdpa.py",
        "dropout_p=self.dropout if self.training else 0.0",
        "dropout_p=self.dropout",
        contract("sdpa", "dropout_is_for_training"),
    ),
    Fault(
        "rows of the batch are mixed",
        f"{ATTENTION}/kernel.py",
        "self.training) @ v",
        "self.training) @ (v + 1e-3 * v.mean(0, keepdim=True))",
        contract("hard", "batch_rows_are_independent"),
    ),
    Fault(
        "a leak in training mode only",
        f"{ATTENTION}/kernel.py",
        "self.training) @ v",
        "self.training) @ (v + 1e-3 * self.training * v.mean(2, keepdim=True))",
        contract("uniform", "future_is_invisible"),
    ),
    Fault(
        "the fused kernel drops a bias while decoding",
        f"{KERNELS}/sdpa.py",
        "        if bias is not None:\n",
        "        if bias is not None and mask is not None:\n",
        contract("sdpa", "bias_is_honoured"),
    ),
    Fault(
        "the fused kernel takes a tensor of scales for 1",
        f"{KERNELS}/sdpa.py",
        "q, scale = q * scale, 1.0",
        "scale = 1.0",
        contract("sdpa", "scales_are_honoured"),
    ),
]
FAST = [
    Fault(
        "tiles: the soft cap is left out of the backward pass",
        f"{ATTENTION}/online_softmax.py",
        "if slope is not None:",
        "if False:",
        blockwise(f"{BLOCKWISE_EQUALS}[causal-cap]"),
    ),
    Fault(
        "tiles: a bias gets no gradient",
        f"{ATTENTION}/online_softmax.py",
        "if bias is not None:\n",
        "if False:\n",
        blockwise(f"{BLOCKWISE_EQUALS}[causal-plain]"),
    ),
    Fault(
        "tiles: a bias is left out",
        f"{ATTENTION}/online_softmax.py",
        "if self.settings.bias is not None:\n            added",
        "if False:\n            added",
        contract("blockwise", "bias_is_honoured"),
    ),
    Fault(
        "tiles: the sink is counted twice",
        f"{ATTENTION}/online_softmax.py",
        "0.0 if sink is None else 1.0",
        "0.0 if sink is None else 2.0",
        blockwise(f"{BLOCKWISE_EQUALS}[causal-one]"),
    ),
    Fault(
        "tiles: the backward pass forgets what was dropped",
        f"{ATTENTION}/online_softmax.py",
        "ds.mul_(kept)",
        "pass",
        blockwise("test_the_backward_pass_drops_what_the_forward_pass_dropped"),
    ),
    Fault(
        "tiles: the window begins one key too late",
        f"{ATTENTION}/tiles.py",
        "low = max(0, visible.past + queries.start - visible.window + 1)",
        "low = max(0, visible.past + queries.start - visible.window + 2)",
        contract("blockwise", "fast_equals_weights"),
    ),
    Fault(
        "tiles: a tile on the diagonal is taken for a full one",
        f"{ATTENTION}/tiles.py",
        "if keys.stop - 1 > visible.past + queries.start:",
        "if keys.stop - 2 > visible.past + queries.start:",
        blockwise("test_no_block_size_changes_the_result[causal]"),
    ),
    Fault(
        "auto: options of the softmax are forgotten on one path",
        f"{KERNELS}/auto.py",
        "return self._of_family(visible, device, biased) or",
        "return",
        blockwise("test_auto_equals_the_formula_whatever_it_chooses[causal]"),
    ),
    Fault(
        "flex: the soft cap is left out",
        f"{KERNELS}/flex.py",
        "score = soft_cap * torch.tanh(score / soft_cap)",
        "pass",
        "tests/test_flex.py::test_values_equal_the_formula_for_every_mask_option_and_bias[causal]",
    ),
    Fault(
        "flex: sinks are left out of the mask",
        f"{KERNELS}/flex.py",
        "            if sinks:\n",
        "            if False:\n",
        contract("flex", "fast_equals_weights"),
    ),
    Fault(
        "the gradient of a bias is that of its last row",
        f"{ATTENTION}/linear.py",
        "rows.sum(0)",
        "rows[-1]",
        f"tests/test_linear.py::{LINEAR_EQUALS}",
    ),
    Fault(
        "a large product is float32 under autocast",
        f"{ATTENTION}/linear.py",
        'not torch.is_autocast_enabled("cpu")',
        "True",
        "tests/test_linear.py::test_it_is_taken_for_large_products_that_are_trained_in_float32_and_for_no_others",
    ),
]
OTHERS = [
    Fault(
        "hard: no gradient passes",
        f"{KERNELS}/hard.py",
        "return one_hot + (soft - soft.detach())",
        "return one_hot",
        formulas("", "test_hard_has_the_gradient_of_the_softmax_in_its_place"),
    ),
    Fault(
        "hard: equal scores share",
        f"{KERNELS}/hard.py",
        "(match & (match.cumsum(-1) == 1)).to(soft.dtype)",
        "match.to(soft.dtype)",
        formulas("", "test_hard_reads_the_best_match_and_the_earliest_of_equal_ones"),
    ),
    Fault(
        "topk: one too many",
        f"{KERNELS}/topk.py",
        "topk(min(self.top,",
        "topk(min(self.top + 1,",
        formulas("", "test_topk_is_the_softmax_over_the_k_best"),
    ),
    Fault(
        "topk: what is left is not normalised",
        f"{KERNELS}/topk.py",
        "return kept / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)",
        "return kept",
        contract("topk", "weights_are_proper"),
    ),
    Fault(
        "uniform: divided by S and not by what is visible",
        f"{KERNELS}/uniform.py",
        "visible.count().clamp_min(1).to(q.dtype)",
        "visible.total",
        formulas("", "test_uniform_divides_by_what_is_visible_and_not_by_the_length"),
    ),
    Fault(
        "log length: without the logarithm",
        f"{ATTENTION}/scale.py",
        ".to(self.gain.dtype).log()",
        ".to(self.gain.dtype)",
        formulas("", "test_scales_by_hand"),
    ),
    Fault(
        "a refusal is not heard",
        f"{MODEL}/honoured.py",
        "in kernel.refuses.items():",
        "in {}.items():",
        "tests/test_patterns.py::test_a_kernel_without_scores_refuses_a_bias_and_names_its_layer",
    ),
    Fault(
        "a pattern stops where it should repeat",
        f"{ATTENTION}/pattern.py",
        "policy.layers[layer % len(policy.layers)]",
        "policy.layers[min(layer, len(policy.layers) - 1)]",
        "tests/test_patterns.py::test_a_pattern_of_kernels_repeats_over_the_layers",
    ),
]
POSITIONS = [
    Fault(
        "rotary: angles in float32",
        f"{POSITION}/rotary.py",
        "self.base**-pair",
        "(self.base**-pair).float().double()",
        formulas("_positions", "test_angles_far_into_a_text_are_right_to_the_last_bit_of_float32"),
    ),
    Fault(
        "rotary: neighbours are the pairs",
        f"{POSITION}/base.py",
        "first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]",
        "first, second, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]",
        formulas("_positions", "test_rotary_by_hand"),
    ),
    Fault(
        "alibi: the sign of the slope",
        f"{ATTENTION}/bias.py",
        "return -self.slopes[",
        "return self.slopes[",
        formulas("_positions", "test_alibi_takes_slope_times_distance_from_scores"),
    ),
    Fault(
        "alibi: slopes where heads are no power of two",
        f"{POSITION}/alibi.py",
        "range(0, 2 * power, 2)",
        "range(2 * power)",
        formulas("_positions", "test_alibi_slopes_of_six_heads_are_those_of_four_and_every_second_of_eight"),
    ),
    Fault(
        "sinusoidal: the wrong exponent",
        f"{POSITION}/sinusoidal.py",
        "self.base**-pair",
        "self.base ** -(2 * pair)",
        formulas("_positions", "test_sinusoidal_waves_by_hand"),
    ),
    Fault(
        "positions start again after the prompt",
        f"{MODEL}/decoder.py",
        "start = cache.length",
        "start = 0",
        contract("sdpa", "cached_equals_full"),
    ),
]
BLOCK = [
    Fault(
        "groups of heads are tiled",
        f"{ATTENTION}/cache.py",
        "torch.repeat_interleave(x, n_head // x.shape[1], dim=1)",
        "x.repeat(1, n_head // x.shape[1], 1, 1)",
        formulas("", "test_grouped_heads_are_interleaved_not_tiled"),
    ),
    Fault(
        "the cache keeps one key too few",
        f"{MODEL}/decoder.py",
        "Keep(mask.span(self.context) - 1,",
        "Keep(mask.span(self.context) - 2,",
        contract("formula", "cached_equals_full_beyond_the_window"),
    ),
    Fault(
        "sinks are dropped when the cache rolls",
        f"{ATTENTION}/cache.py",
        "        if length > past:\n",
        "        if False:\n",
        contract("sdpa", "cached_equals_full_beyond_the_window"),
    ),
    Fault(
        "K = V in the cache: turned before it is normed",
        f"{ATTENTION}/block.py",
        "return q, _turned(self.k_norm(k), given.key_rotation), v if",
        "return q, self.k_norm(_turned(k, given.key_rotation)), v if",
        formulas(
            "_projections",
            "test_decoding_equals_the_full_pass_for_every_projection_position_and_mask[SharedKV-rms_gain]",
        ),
    ),
    Fault(
        "K = V in the cache: turned by the place in the row and not in the document",
        f"{MODEL}/decoder.py",
        "visible.key_positions if shared.places is None else shared.places",
        "visible.key_positions",
        formulas("_projections", "test_packed_documents_decode_from_one_stream_as_they_do_alone"),
    ),
    Fault(
        "K = V in the cache: stored twice",
        f"{ATTENTION}/block.py",
        "if kept is not None and self.late:",
        "if False:",
        formulas("_projections", "test_keys_that_are_values_are_cached_once"),
    ),
    Fault(
        "values are turned with the keys",
        f"{ATTENTION}/block.py",
        "return q, _turned(self.k_norm(k), given.rotation), v",
        "return q, _turned(self.k_norm(k), given.rotation), _turned(v, given.rotation)",
        "tests/test_peers.py::test_logits_equal_llama_and_with_a_window_mistral",
    ),
    Fault(
        "what a tie saves is counted as for two matrices",
        f"{MODEL}/block.py",
        'round(saved / ((3 if mlp == "swiglu" else 2) *',
        "round(saved / (2 *",
        formulas("_projections", "test_saved_parameters_go_to_the_mlp_to_within_one_unit_per_layer"),
    ),
    Fault(
        "values are queries where they should be keys",
        f"{ATTENTION}/projections.py",
        "        q, k = self.qkv(x)\n        return heads(q, self.n_head), heads(k, self.n_kv_head)\n",
        "        q, k = self.qkv(x)\n        return heads(q, self.n_head), heads(q, self.n_kv_head)\n",
        formulas("_projections", "test_ties_by_hand"),
    ),
]
DECODER = [
    Fault(
        "the look-back reaches into another document",
        f"{MODEL}/layers.py",
        "        if places is not None:\n",
        "        if False:\n",
        contract("sdpa", "documents_are_apart"),
    ),
    Fault(
        "the look-back forgets the last token with the cache",
        f"{MODEL}/layers.py",
        'behind(x, 1, "smear", cache)',
        'behind(x, 1, "smear", None)',
        contract("sdpa", "cached_equals_full"),
    ),
    Fault(
        "value embeddings are in the other layers",
        f"{MODEL}/decoder.py",
        "value_embeddings and (n_layer - layer) % 2",
        "value_embeddings and (n_layer - layer + 1) % 2",
        "tests/test_model.py::test_every_parameter_has_one_role_and_only_matrices_are_hidden",
    ),
    Fault(
        "initial values of a row depend on the width",
        f"{MODEL}/parameters.py",
        "np.array([0, 0, 0, row], dtype=np.uint64)",
        "np.array([0, 0, 0, row * values.shape[1]], dtype=np.uint64)",
        "tests/test_model.py::test_a_larger_tensor_contains_the_smaller_as_its_leading_block",
    ),
    Fault(
        "sampling leaves the model in eval mode",
        f"{MODEL}/generate.py",
        "            model.train()",
        "            model.eval()",
        "tests/test_generate.py::test_sampling_leaves_the_mode_of_the_model_and_the_global_generator_alone",
    ),
    Fault(
        "top_p keeps one token too few",
        f"{MODEL}/generate.py",
        "p.cumsum(-1) - p >= top_p",
        "p.cumsum(-1) >= top_p",
        "tests/test_generate.py::test_filters_keep_the_tokens_worked_out_by_hand",
    ),
    Fault(
        "text beyond the context is encoded from one token too few",
        f"{MODEL}/decoder.py",
        "convolved + 1 + (self.smear is not None)",
        "convolved + (self.smear is not None)",
        "tests/test_reach.py::test_the_last_logit_depends_on_its_receptive_field_and_on_nothing_before",
    ),
]
FAULTS = [
    *MASKS,
    *SOFTMAX,
    *FAST,
    *OTHERS,
    *POSITIONS,
    *BLOCK,
    *DECODER,
    *DECODING,
    *NORMALISERS,
    *STATES,
    *PARTS,
    *INSIDE,
]
