"""A task, the samples that are drawn from it in any length, and their scores."""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bptjax.data.templates import render
from bptjax.data.tokenizer import Tokenizer

# Share of the length that is aimed at, and that is enough.
AIM, ENOUGH = 0.993, 0.985
# Largest number of texts that are made for one sample.
ATTEMPTS = 24
# Texts in place of the prompt and of the answer in the chat template.
PROMPT, ANSWER = "PROMPT 5d1c", "ANSWER 5d1c"

Encode = Callable[[str, str], np.ndarray]


@dataclass(frozen=True)
class Drawn:
    """The random parts of a sample.

    Attributes:
      context: the long text.
      query: what the question names.
      references: strings that a correct answer contains.
      depth: where the answer is in the context, 0 at the start and 1 at the end; None if it is in
        several or random places.
    """

    context: str
    query: str
    references: tuple[str, ...]
    depth: float | None = None


def recall(text: str, references: tuple[str, ...]) -> float:
    """Returns the share of the references in the text, in any case. Hsieh et al. 2024, RULER, arXiv
    2404.06654."""
    return sum(each.lower() in text.lower() for each in references) / len(references)


def any_reference(text: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the text contains one of the references, in any case, else 0."""
    return float(any(each.lower() in text.lower() for each in references))


def first_number(text: str, references: tuple[str, ...]) -> float:
    """Returns 1 if the first number in the text is the reference, else 0."""
    return float(re.findall(r"\d+", text)[:1] == list(references))


@dataclass(frozen=True)
class Task:
    """A task; a value of `TASKS`.

    Attributes:
      draw: function of the random numbers, the units (sentences, words or records) of the context,
        the index of the sample, and the filler; None for the task's own. A task with `files` takes
        these in place of the filler.
      prompt: user's message, with {context} and {query}.
      start: first words of the answer, which the model continues.
      answer_tokens: largest number of tokens of an answer; more if the references take more.
      units: smallest number of units.
      files: the task reads files of the user.
    """

    draw: Callable[[np.random.Generator, int, int, Any], Drawn]
    prompt: str
    start: str
    answer_tokens: int
    units: int = 4
    score: Callable[[str, tuple[str, ...]], float] = recall
    files: bool = False


@dataclass(frozen=True)
class Sample:
    """A prompt, its token ids with the start of the answer, and what was drawn.

    Attributes:
      new_tokens: largest number of tokens of the answer.
    """

    prompt: str
    start: str
    ids: np.ndarray
    new_tokens: int
    drawn: Drawn


def encoder(tokenizer: Tokenizer, chat: bool) -> Encode:
    """Returns a function of a prompt and the start of its answer that returns their token ids, in
    the chat template if `chat` is true. The start is the beginning of the assistant's message, so
    that models with reasoning answer without it.

    Raises:
      ValueError: the template does not write both messages.
    """
    if not chat:
        return lambda prompt, start: tokenizer.encode_prompt(f"{prompt}\n{start}")
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ANSWER}]
    template = tokenizer.chat_template or ""
    text, _ = render(messages, template, tokenizer, {"enable_thinking": False})
    before, _, rest = text.partition(PROMPT)
    between, found, _ = rest.partition(ANSWER)
    if not found:
        raise ValueError("the chat template must write a prompt and its answer")
    return lambda prompt, start: tokenizer.encode_rendered(before + prompt + between + start)


class Sampler:
    """The samples of one task and length, which depend on the seed and their index alone.

    The number of units for the length is found once. The text of a sample is tokenized once; it is
    made again in the rare case that it is too long or too short. `key` names the length in errors.

    Raises:
      ValueError: the length is too short for the task.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        length: int,
        *,
        tokenizer: Tokenizer,
        encode: Encode,
        seed: int,
        filler: Any = None,
        key: str = "--lengths",
    ):
        self.name, self.task, self.length, self.filler = name, task, length, filler
        self._key = key
        self._tokenizer, self._encode = tokenizer, encode
        self._seeds = seed, zlib.crc32(name.encode()), length
        least = self._sample(0, task.units)
        if (shortest := len(least.ids) + least.new_tokens) > length:
            raise ValueError(
                f"{key}={length}: must be at least {shortest} tokens for the task {name}"
            )
        more = self._sample(0, 64 + task.units)
        self._cost = max(len(more.ids) - len(least.ids), 1) / 64
        room = AIM * (length - least.new_tokens) - len(least.ids)
        self._units = task.units + max(int(room / self._cost), 0)
        # Later units can take more tokens, such as numbers of more digits.
        first, units = self._fitted(0)
        self._cost = max(len(first.ids) / units, 1.0)
        self._units = units

    def _sample(self, index: int, units: int) -> Sample:
        task, rng = self.task, np.random.default_rng((*self._seeds, index))
        drawn = task.draw(rng, units, index, self.filler)
        prompt = task.prompt.format(context=drawn.context.rstrip(), query=drawn.query)
        start = task.start.format(query=drawn.query)
        answer = self._tokenizer.encode(" " + ", ".join(drawn.references))
        new_tokens = max(task.answer_tokens, len(answer) + 1)
        return Sample(prompt, start, self._encode(prompt, start), new_tokens, drawn)

    def _fitted(self, index: int) -> tuple[Sample, int]:
        """Returns the sample and its units: as many as fit, or nearly as many."""
        best, units, size = None, self._units, 0
        low, high = self.task.units - 1, 2**62
        for _ in range(ATTEMPTS):
            sample = self._sample(index, units)
            limit = self.length - sample.new_tokens
            size = len(sample.ids) + sample.new_tokens
            if size <= self.length:
                best, low = (sample, units), units
            else:
                high = units
            if high - low <= 1 or ENOUGH * limit <= len(sample.ids) <= limit:
                break
            step = round((AIM * limit - len(sample.ids)) / self._cost)
            units = min(max(units + step, low + 1), high - 1)
        if best is None:
            raise ValueError(
                f"{self._key}={self.length}: must be longer; {size} tokens are too many"
            )
        return best

    def __getitem__(self, index: int) -> Sample:
        return self._fitted(index)[0]
