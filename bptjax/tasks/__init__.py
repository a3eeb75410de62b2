"""Tasks that predict whether a model uses its context, and their table.

Definitions and scores follow RULER (Hsieh et al. 2024, arXiv 2404.06654); `passkey` follows
Mohtashami & Jaggi 2023, arXiv 2305.16300.
"""

from collections.abc import Sequence
from functools import partial

from bptjax.tasks.counting import coded_words, common_words
from bptjax.tasks.needles import among_needles, needles, passkey, records, variables
from bptjax.tasks.questions import questions
from bptjax.tasks.sample import Task, any_reference, first_number

_HIDDEN = (
    "Secret {kind}s are hidden in the text below. Remember them, because a question about them "
    "follows the text.\n\n{{context}}\n\n{question}"
)
_ONE = _HIDDEN.format(kind="number", question="What is the secret number of {query}?")
_ALL = _HIDDEN.format(kind="number", question="What are all the secret numbers of {query}?")
_NUMBER, _NUMBERS = "The secret number of {query} is", "The secret numbers of {query} are"

# The task that reads `--questions`.
QUESTIONS = "questions"
# Tasks by the names of `--tasks`.
TASKS: dict[str, Task] = {
    "passkey": Task(
        passkey,
        "The text below contains a pass key. Find it and remember it, because a question about it "
        "follows the text.\n\n{context}\n\nWhat is the pass key?",
        "The pass key is",
        32,
        score=first_number,
    ),
    "niah_single": Task(needles, _ONE, _NUMBER, 128),
    "niah_multikey": Task(partial(needles, keys=4), _ONE, _NUMBER, 128),
    "niah_needles": Task(among_needles, _ONE, _NUMBER, 128),
    "niah_uuid": Task(
        partial(needles, kind="id"),
        _HIDDEN.format(kind="id", question="What is the secret id of {query}?"),
        "The secret id of {query} is",
        128,
    ),
    "niah_multivalue": Task(partial(needles, values=4), _ALL, _NUMBERS, 128),
    "niah_multiquery": Task(partial(needles, keys=4, queries=4), _ALL, _NUMBERS, 128),
    "variable_tracking": Task(
        variables,
        "The text below contains assignments of variables, such as VAR AB = 12 and VAR CD = VAR "
        "AB, after which both AB and CD have the value 12. Follow them.\n\n{context}\n\nWhich five "
        "variables have the value {query}? List all five.",
        "The variables that have the value {query} are",
        64,
    ),
    "common_words": Task(
        common_words,
        "In the numbered list of words below, ten words occur far more often than the others. Find "
        "them.\n\n{context}\n\nWhich ten words occur most often in the list?",
        "The ten words that occur most often are",
        128,
        units=40,
    ),
    "frequent_words": Task(
        coded_words,
        "Count how often each coded word occurs in the text below. Ignore the dots.\n\n{context}"
        "\n\nWhich three coded words occur most often?",
        "The three coded words that occur most often are",
        64,
        units=120,
    ),
    "record": Task(
        records,
        "Each line below is a record of five words with a number. Remember the records, because a "
        "question about one of them follows.\n\n{context}\n\nWhat are the five words of record "
        "{query}, in order?",
        "The words of record {query} are:",
        64,
    ),
    QUESTIONS: Task(
        questions,
        "Answer the question about the documents below with words from them, and with nothing else."
        "\n\n{context}\n\nAnswer with words from the documents, and with nothing else: {query}",
        "Answer:",
        32,
        score=any_reference,
        files=True,
    ),
}


def task_names(given: Sequence[str], key: str, files: bool = False) -> list[str]:
    """Returns the tasks that `key`, a flag or a key of a config, names, in the order of the table;
    with `files`, also those that read files of the user.

    Raises:
      ValueError: a task is unknown.
    """
    known = [name for name, task in TASKS.items() if files or not task.files]
    for name in given:
        if name not in known and name != "all":
            raise ValueError(f"{key}={name}: must be all or one of {', '.join(known)}")
    return [name for name in known if name in given or "all" in given]
