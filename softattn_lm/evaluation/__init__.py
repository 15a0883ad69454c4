"""Room 7: what a model is worth on a text. Plain torch."""

from softattn_lm.evaluation.likelihood import Likelihood, LikelihoodResult

__all__ = ["Likelihood", "LikelihoodResult"]
