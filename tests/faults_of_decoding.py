"""Faults of a flat decode step, which shares no code with the step that it stands for."""

from tests.fault import MODEL, Fault

LOGITS = "tests/test_decode.py::test_logits_are_those_of_the_model"
DECODING = [
    Fault(
        "flat: sinks are overwritten",
        f"{MODEL}/ring.py",
        "return position if position < self.sinks else self.sinks + (position - self.sinks) % self.window",
        "return position % self.size",
        LOGITS,
    ),
    Fault(
        "flat: empty slots are read",
        f"{MODEL}/ring.py",
        "self.memory.new_full((1, 1, self.size), -torch.inf)",
        "self.memory.new_full((1, 1, self.size), 0.0)",
        LOGITS,
    ),
    Fault(
        "flat: a token is lost when more slots are laid out",
        f"{MODEL}/ring.py",
        "new[..., :taken, :] = apart.copy_(old)  # they overlap",
        "new[..., : taken - 1, :] = apart.copy_(old)[..., : taken - 1, :]",
        "tests/test_decode.py::test_logits_are_those_of_the_model_while_more_and_more_slots_are_laid_out",
    ),
    Fault(
        "graphed: what the cache holds is written behind, and read from the front",
        f"{MODEL}/graphed.py",
        "places = self.places[: cache.length]",
        "places = self.places[-cache.length :]",
        "tests/test_fast_paths.py::test_logits_of_a_step_of_fixed_shapes_are_those_of_a_plan",
    ),
    Fault(
        "compiled: what an earlier text left behind the token is read",
        f"{MODEL}/step_parts.py",
        "scores.masked_fill(~seen, -torch.inf)",
        "scores.masked_fill(~seen, 0.0)",
        "tests/test_compiled_decode.py::test_parts_made_for_a_compiler_are_those_of_the_library",
    ),
    Fault(
        "compiled: the likeliest of a chunk is taken for that of all",
        f"{MODEL}/step_parts.py",
        "return chunk * size + place.gather(-1, chunk)",
        "return place.gather(-1, chunk)",
        "tests/test_compiled_decode.py::test_the_likeliest_is_the_first_of_equals",
    ),
    Fault(
        "flat: keys of the prompt keep the order of the model",
        f"{MODEL}/ring.py",
        "keys.copy_(keys[..., turns.order(keys.shape[-1], keys.shape[-1])])",
        "turns.order(keys.shape[-1], keys.shape[-1])",
        LOGITS,
    ),
    Fault(
        "flat: angles stop at the end of the first table",
        f"{MODEL}/ring.py",
        "self.now = self.table[position - self.start]",
        "self.now = self.table[position % TURNS]",
        "tests/test_decode.py::test_a_drawn_text_is_the_same_too",
    ),
    Fault(
        "flat: a token carries itself",
        f"{MODEL}/decode.py",
        "torch.addcmul(x, self.smear, self.before), x",
        "torch.addcmul(x, self.smear, x), x",
        LOGITS,
    ),
    Fault(
        "flat: the bias of what is added to the stream is left out",
        f"{MODEL}/rows.py",
        "(stream if self.bias is None else stream.add_(self.bias)).addmm_(x, self.weight)",
        "stream.addmm_(x, self.weight)",
        LOGITS,
    ),
    Fault(
        "flat: a hook is passed over",
        f"{MODEL}/decode.py",
        "part._forward_hooks or part._forward_pre_hooks for part",
        "part._forward_pre_hooks for part",
        "tests/test_decode.py::test_what_is_not_known_is_left_to_the_model",
    ),
    Fault(
        "flat: only the types of parts are looked at",
        f"{MODEL}/decode.py",
        "and all(KNOWN_PARAMETERS.fullmatch(name) for name, _ in model.named_parameters())",
        "and True",
        "tests/test_decode.py::test_what_is_not_known_is_left_to_the_model",
    ),
]
