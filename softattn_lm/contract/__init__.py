"""Room 10: what every attention must keep, as properties that run on anybody's: ours in the tests, yours by a
command.
"""

from softattn_lm.contract import dropout, kernels, models, recurrence
from softattn_lm.contract.property import PROPERTIES, Verdict, run_property
from softattn_lm.contract.subject import Subject

# Importing the modules registers their properties.
__all__ = ["PROPERTIES", "Subject", "Verdict", "dropout", "kernels", "models", "recurrence", "run_property"]
