"""Evaluations: one kind per file, and their table."""

from bptjax.evaluation.held_out import HeldOut
from bptjax.evaluation.passkey import PassKey
from bptjax.evaluation.perplexity import Perplexity
from bptjax.evaluation.task import Task

# Evaluations by the name of their files of rows and plots.
TASKS: dict[str, type[Task]] = {
    "held_out": HeldOut,
    "perplexity": Perplexity,
    "passkey": PassKey,
}
