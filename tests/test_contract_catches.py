"""The contract on trial: kernels that are wrong in one situation only, each refused by the property that says so."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from softattn_lm.attention.kernel import AttentionKernel
from softattn_lm.attention.kernels.formula import softmax_weights
from softattn_lm.attention.visibility import Causal
from softattn_lm.contract import Subject, run_property
from tests.recurrent_kernel import Summing


class Right(AttentionKernel):
    """The softmax; the others change one thing."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)

    def weights(self, q, k, *, scale, visible, bias=None, features=None):
        return softmax_weights(q, k, scale, visible, bias)


class NarrowWindow(Right):
    def weights(self, q, k, *, visible, **given):
        if visible.window is not None and visible.window > 1:
            visible = replace(visible, window=visible.window - 1)
        return super().weights(q, k, visible=visible, **given)


class NoSinks(Right):
    def weights(self, q, k, *, visible, **given):
        return super().weights(q, k, visible=replace(visible, sinks=0), **given)


class IgnoresDocumentsOfLongTexts(Right):
    def weights(self, q, k, *, visible, **given):
        if visible.total > 100:
            visible = replace(visible, documents=None)
        return super().weights(q, k, visible=visible, **given)


class IgnoresScalesPerHead(Right):
    def weights(self, q, k, *, scale, **given):
        return super().weights(q, k, scale=1.0 if isinstance(scale, torch.Tensor) else scale, **given)


class IgnoresBiasBehindAnAttribute(Right):
    soft_cap = 50.0

    def weights(self, q, k, *, bias=None, **given):
        return super().weights(q, k, bias=None, **given)


class DropsValues(Right):
    def forward(self, q, k, v, **given):
        return self.weights(q, k, **given) @ F.dropout(v, self.dropout, self.training)


class DropsOutputs(Right):
    def forward(self, q, k, v, **given):
        return F.dropout(self.weights(q, k, **given) @ v, self.dropout, self.training)


class LeaksWithDropout(Right):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y + 0.05 * v.mean(2, keepdim=True) if self.training and self.dropout else y


class DrawsAgainInBackward(Right):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y.detach() + (other := super().forward(q, k, v, **given)) - other.detach() if self.dropout else y


class NoMaskAtMultiplesOf64(Right):
    def forward(self, q, k, v, *, scale, visible, **given):
        if q.shape[2] % 64 == 0 and visible.window is None and visible.documents is None:
            return torch.softmax(scale * (q @ k.mT), -1) @ v
        return super().forward(q, k, v, scale=scale, visible=visible, **given)


class WrongAtOtherWidths(Right):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y if q.shape[-1] == 8 else y + v.mean(2, keepdim=True)


class ForgetsAFarCache(Right):
    def forward(self, q, k, v, **given):
        if q.shape[2] == 1 and k.shape[2] > 60:
            return v[:, :, -60:].mean(2, keepdim=True)
        return super().forward(q, k, v, **given)


class MixesLargeBatches(Right):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return y + y.mean(0, keepdim=True) if len(y) > 2 else y


class ChangesItsKeys(Right):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        with torch.no_grad():
            k.mul_(0.5)
        return y


class RemembersTraining(Right):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.seen = 0.0

    def forward(self, q, k, v, **given):
        if self.training:
            self.seen = float(v.mean())
        return super().forward(q, k, v, **given) + self.seen


class DoublesInTrainingWithoutDropout(Right):
    def forward(self, q, k, v, **given):
        y = super().forward(q, k, v, **given)
        return 2 * y if self.training and not self.dropout else y


class DoublesLargeBatches(Right):
    """Whatever stands in the other rows; `weights` does as well."""

    def weights(self, q, k, **given):
        a = super().weights(q, k, **given)
        return 2 * a if len(a) > 2 else a


class Featured(Right):
    """Right as well: a number of each token is added to its scores; the rest of these change one thing."""

    def __init__(self, d_model: int, n_head: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.number = torch.nn.Linear(d_model, n_head)

    def features(self, x):
        return self.number(x).mT[..., None]  # (B, H, T, 1)

    def weights(self, q, k, *, features, **given):
        return super().weights(torch.cat((q, torch.ones_like(q[..., :1])), -1), torch.cat((k, features), -1), **given)


class ReadsFeaturesOfTheFuture(Featured):
    def weights(self, q, k, *, features, **given):
        return super().weights(q, k, features=features.softmax(2), **given)


class HandsFeaturesOfTheFutureOn(Featured):
    """The same within `features`, before the kernel is called."""

    def features(self, x):
        return super().features(x).flip(2).cumsum(2).flip(2)


class HandsFeaturesOfThePastOn(Featured):
    """Which a cache cannot: it calls `features` with the new tokens only."""

    def features(self, x):
        return super().features(x).cumsum(2)


class TakesFeaturesTimesZero(Featured):
    def forward(self, q, k, v, *, features, **given):
        return super().forward(q, k, v, features=features, **given) + 0.0 * features.sum(2, keepdim=True)


class LearnsNoFeatures(Featured):
    def forward(self, q, k, v, *, features, **given):
        return super().forward(q, k, v, features=features.detach(), **given)


class MixesFeaturesOfABatch(Featured):
    def weights(self, q, k, *, features, **given):
        return super().weights(q, k, features=features + features.mean(0, keepdim=True), **given)


class MakesFeaturesOfABatchInTraining(Featured):
    """As a batch norm does, which counts as reading other rows."""

    def features(self, x):
        return super().features(x - x.mean(0, keepdim=True) if self.training else x)


class ShiftsFeaturesByOneToken(Featured):
    """Each key gets the number of the key before it, and the first that of the last."""

    def weights(self, q, k, *, features, **given):
        return super().weights(q, k, features=features.roll(1, 2), **given)


class ReadsFeaturesOfTheFutureWithDropout(Featured):
    def forward(self, q, k, v, *, features, **given):
        y = super().forward(q, k, v, features=features, **given)
        return y + features.mean(2, keepdim=True) if self.training and self.dropout else y


class Recurrent(Summing):
    """Right as well, in a state that is at least float32; the rest of these change one thing."""

    def recur(self, q, k, v, state, **given):
        y, state = super().recur(q.float(), k.float(), v.float(), state, **given)
        return y.to(q.dtype), state


class RemembersOnItself(Recurrent):
    """Its state counts tokens only, so that two caches share what is remembered."""

    held = None

    def recur(self, q, k, v, state, **given):
        y, self.held = super().recur(q, k, v, None if state is None else self.held, **given)
        seen = q.new_zeros(len(q), 1) if state is None else state["seen"]
        return y, {"seen": seen + q.shape[2]}


class GoesOnFromTheTextBefore(Recurrent):
    """With one row; a state of None does not start it again."""

    held = None

    def recur(self, q, k, v, state, **given):
        if state is None and len(q) == 1:
            state = self.held
        y, state = super().recur(q, k, v, state, **given)
        self.held = state if len(q) == 1 else None
        return y, state


class MixesStatesOfLargeBatches(Recurrent):
    def recur(self, q, k, v, state, **given):
        y, state = super().recur(q, k, v, state, **given)
        return y, {"sum": state["sum"] + 0.01 * state["sum"].roll(1, 0)} if len(q) > 2 else state


class MixesStatesItGoesOnFrom(Recurrent):
    """The last row reads the first; the first one reads none but its own."""

    def recur(self, q, k, v, state, **given):
        if state is not None:
            state = {"sum": torch.cat((state["sum"][:-1], state["sum"][-1:] + 0.01 * state["sum"][:1]))}
        return super().recur(q, k, v, state, **given)


class RecursAheadInBfloat16(Recurrent):
    def recur(self, q, k, v, state, **given):
        y, state = super().recur(q, k, v, state, **given)
        return y + 0.01 * v.mean(2, keepdim=True) if q.dtype == torch.bfloat16 else y, state


class RecursAheadInTraining(Recurrent):
    def recur(self, q, k, v, state, **given):
        y, state = super().recur(q, k, v, state, **given)
        return y + v.mean(2, keepdim=True) if self.training else y, state


class RecursOtherwiseInTraining(Recurrent):
    """It hides the future, and says something else."""

    def recur(self, q, k, v, state, **given):
        y, state = super().recur(q, k, v, state, **given)
        return 1.1 * y if self.training else y, state


class RoundsItsState(Recurrent):
    """To 8 bits at each call, where q comes in 8 bits."""

    def recur(self, q, k, v, state, **given):
        y, state = super().recur(q, k, v, state, **given)
        return y, {"sum": state["sum"].to(q.dtype).float()}


WRONG = {
    NarrowWindow: "weights_are_proper",
    NoSinks: "weights_are_proper",
    IgnoresDocumentsOfLongTexts: "weights_are_proper",
    IgnoresScalesPerHead: "scales_are_honoured",
    IgnoresBiasBehindAnAttribute: "bias_is_honoured",
    DropsValues: "dropout_is_for_training",
    DropsOutputs: "dropout_is_for_training",
    LeaksWithDropout: "dropout_keeps_the_mask",
    DrawsAgainInBackward: "dropout_keeps_the_mask",
    NoMaskAtMultiplesOf64: "fast_equals_weights",
    WrongAtOtherWidths: "widths_do_not_matter",
    ForgetsAFarCache: "fast_equals_weights",
    MixesLargeBatches: "batch_rows_are_independent",
    ChangesItsKeys: "calls_leave_no_trace",
    RemembersTraining: "calls_leave_no_trace",
    DoublesInTrainingWithoutDropout: "fast_equals_weights",
    DoublesLargeBatches: "batch_rows_are_independent",
}


WRONG_FEATURES = [
    (ReadsFeaturesOfTheFuture, "future_is_invisible"),
    (ReadsFeaturesOfTheFuture, "gradients_respect_the_mask"),
    (ReadsFeaturesOfTheFuture, "prefix_is_stable"),
    (HandsFeaturesOfTheFutureOn, "future_is_invisible"),
    (HandsFeaturesOfTheFutureOn, "model_hides_the_future"),
    (HandsFeaturesOfThePastOn, "cached_equals_full"),
    (TakesFeaturesTimesZero, "future_nan_keys_are_not_read"),
    (LearnsNoFeatures, "fast_equals_weights"),
    (MixesFeaturesOfABatch, "batch_rows_are_independent"),
    (MakesFeaturesOfABatchInTraining, "batch_rows_are_independent"),
    (ShiftsFeaturesByOneToken, "weights_are_proper"),
    (ReadsFeaturesOfTheFutureWithDropout, "dropout_keeps_the_mask"),
]


WRONG_RECURRENCES = [
    (RemembersOnItself, "states_are_all_it_remembers"),
    (GoesOnFromTheTextBefore, "states_are_all_it_remembers"),
    (MixesStatesOfLargeBatches, "states_are_independent"),
    (MixesStatesItGoesOnFrom, "states_are_independent"),
    (RecursAheadInBfloat16, "recurrence_hides_the_future"),
    (RecursAheadInTraining, "recurrence_hides_the_future"),
    (RecursOtherwiseInTraining, "recurrence_equals_forward"),
    (RoundsItsState, "recurrence_is_close_in_bfloat16"),
]


@pytest.mark.parametrize(
    ("kernel", "property"),
    [*WRONG.items(), *WRONG_FEATURES, *WRONG_RECURRENCES],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_kernel_that_is_wrong_somewhere_is_refused_by_the_property_that_says_so(kernel, property):
    assert not run_property(property, Subject(kernel.__name__, kernel)).ok


@pytest.mark.parametrize("property", sorted(set(WRONG.values())))
def test_the_kernel_they_are_made_of_is_not_refused(property):
    verdict = run_property(property, Subject("right", Right))
    assert verdict.ok, verdict.worst


@pytest.mark.parametrize("property", sorted({property for _, property in WRONG_FEATURES}))
def test_the_kernel_with_features_that_they_are_made_of_is_not_refused(property):
    verdict = run_property(property, Subject("featured", Featured))
    assert verdict.ok, verdict.worst


@pytest.mark.parametrize("property", sorted({property for _, property in WRONG_RECURRENCES}))
def test_the_kernel_with_a_state_that_they_are_made_of_is_not_refused(property):
    verdict = run_property(property, Subject("recurrent", Recurrent))
    assert verdict.ok, verdict.worst


@pytest.mark.parametrize("window", [2, 3, 4, 5])
def test_a_composition_with_a_small_window_is_not_refused(window):
    for mask in (Causal(window), Causal(window, sinks=1)):
        verdict = run_property("returned_weights_are_used", Subject("right", Right, {"mask": mask}))
        assert verdict.ok, verdict.worst
