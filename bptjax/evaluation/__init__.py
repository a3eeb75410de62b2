"""Evaluations: one kind per file, and their table."""

from bptjax.evaluation.context import ContextTasks
from bptjax.evaluation.held_out import HeldOut
from bptjax.evaluation.lm_eval import LmEval
from bptjax.evaluation.perplexity import Perplexity
from bptjax.evaluation.protocol import Evaluation

# Evaluations by the name of their files of rows and plots.
EVALUATIONS: dict[str, type[Evaluation]] = {
    "held_out": HeldOut,
    "perplexity": Perplexity,
    "tasks": ContextTasks,
    "lm_eval": LmEval,
}
