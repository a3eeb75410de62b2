"""Evaluations of long text: one kind a file, and the table of them."""

from bptjax.evaluation.passkey import PassKey
from bptjax.evaluation.perplexity import Perplexity
from bptjax.evaluation.task import Task

# By the name of their files of rows and plots.
TASKS: dict[str, type[Task]] = {"perplexity": Perplexity, "passkey": PassKey}
