"""`bptjax chat`: talks with a model in the terminal."""

import json
import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax.numpy as jnp

from bptjax.cli.generate import check_options, show_growing
from bptjax.cli.main import launch, warn
from bptjax.data.chat import ANSWER, Message
from bptjax.data.templates import chat_prompt, describe_clock_and_chance, opening
from bptjax.data.tokenizer import Tokenizer
from bptjax.models.decoder import Decoder
from bptjax.models.generation import continuations
from bptjax.models.prefill import HeldCache
from bptjax.models.sampling import Sampling, choose_sampling
from bptjax.run.output import describe, plural, write_atomically
from bptjax.weights.loading import load_opened, open_decoder

PREFILL_CHUNK = 2048
HELP = "/reset starts a new chat, /save FILE writes this one, /exit or Ctrl-D ends"

main = partial(launch, "chat")


def run(args: Namespace) -> int:
    """Answers the lines of stdin until it ends. Answers go to stdout, all else to stderr.

    Raises:
      ValueError, OSError: one line about the wrong flag or checkpoint.
    """
    check_options(args.max_new_tokens, PREFILL_CHUNK, args.stop, args.seed, prefix="--")
    pretrained, tokenizer = open_decoder(args.model, args.tokenizer, warn)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"--model={args.model}: must have a chat template; use bptjax generate, or a "
            "--tokenizer with a template"
        )
    chosen = {f.name: getattr(args, f.name) for f in fields(Sampling)}
    sampling, values = choose_sampling(tokenizer.generation_config, warn, chat=True, **chosen)
    for line in (values, *describe_clock_and_chance(tokenizer), f"loading {args.model}"):
        warn(line)
    cached = 1, PREFILL_CHUNK + args.max_new_tokens
    model = load_opened(pretrained, args.dtype, args.device, warn, cached=cached)
    options = dict(
        sampling=sampling,
        stop_strings=args.stop,
        prefill_chunk=PREFILL_CHUNK,
        dtype=jnp.dtype(args.dtype or model.head_matrix.dtype),
    )
    chat_prompt(opening("", args.system), tokenizer)  # The template may refuse.
    start = opening("", args.system)[:-1]
    chat = Conversation(model, tokenizer, start, args.max_new_tokens, args.seed, options)
    if chat.held is None:
        warn("this architecture reads the whole chat again for each answer")
    warn(HELP)
    for line in _lines():
        command, _, argument = line.strip().partition(" ")
        if command == "/exit":
            break
        try:
            if command == "/reset":
                chat.reset()
            elif command == "/save":
                chat.save(argument.strip())
            elif command[:1] == "/" and command[1:].isalpha() and not argument:
                warn(f"unknown command {command}: {HELP}")
            elif command:
                chat.answer(line)
        except (ValueError, OSError) as error:
            warn(f"error: {describe(error)}")
    return 0


def _lines() -> Iterator[str]:
    """Yields the lines of stdin, with editing if it is a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` a history and arrow keys)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@dataclass
class Conversation:
    """A chat with a model.

    Attributes:
      start: messages that stay after `reset`.
      max_new_tokens: largest number of tokens in an answer.
      options: keywords of `continuations`.
      messages: all messages.
      held: cache of the tokens so far; None if the model cannot continue a cache.
    """

    model: Decoder
    tokenizer: Tokenizer
    start: list[Message]
    max_new_tokens: int
    seed: int
    options: dict[str, Any]
    messages: list[Message] = field(init=False)
    held: HeldCache | None = field(init=False)

    def __post_init__(self):
        self.messages = list(self.start)
        self.held = HeldCache() if HeldCache.saves_work(self.model.config) else None

    @property
    def context(self) -> float:
        """The number of tokens that the model supports; infinite without a limit."""
        config = self.model.config
        limited = config.position_embedding == "learned" or config.exceeds_positions(2**62)
        return (limited and config.max_position_embeddings) or math.inf

    def reset(self) -> None:
        """Removes all messages but the system message."""
        self.messages = list(self.start)
        warn("new chat")

    def save(self, name: str) -> None:
        """Writes the chat to a new file, as a record that `data.path` can name.

        Raises:
          ValueError: there is no file name or no answer, or the file exists.
        """
        file = Path(name).expanduser()
        if not name or file.exists():
            raise ValueError(f"/save {name}: must name a new file")
        if self.messages == self.start:
            raise ValueError(f"/save {name}: must follow an answer; there is none yet")
        write_atomically(file, json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        warn(f"written: {file}")

    def answer(self, text: str) -> None:
        """Prints the answer to a message, and keeps both. An interrupt ends the answer.

        Raises:
          ValueError: the chat has no room for an answer, or the template refuses the message.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = chat_prompt(messages, self.tokenizer)
        room = self.context - len(prompt)
        if room < 1:
            raise ValueError(
                f"the chat and this message: must have fewer than {self.context:,} tokens, the "
                f"model's context, not {len(prompt):,}; shorten the message, or /save and /reset"
            )
        most = int(min(self.max_new_tokens, room))
        stream = continuations(
            self.model,
            self.tokenizer,
            [prompt],
            new_tokens=most,
            seed=(self.seed + len(messages)) % 2**32,
            held=self.held,
            **self.options,
        )
        said, times = "", []
        try:
            texts = (texts[0] for texts in stream)
            for text in show_growing(texts, self.options["stop_strings"]):
                said = text
                times.append(perf_counter())
        except KeyboardInterrupt:
            if self.held:
                self.held.cache = None  # A step may have been using it.
            print()
            warn("stopped")
            if not said:
                return
        # Of gpt-oss, whose template wants the final message alone.
        final = said.rpartition("<|message|>")[2]
        self.messages = [*messages, {"role": ANSWER, "content": final}]
        self._describe(len(prompt) + len(times), times, len(times) == most)

    def _describe(self, tokens: int, times: list[float], full: bool) -> None:
        """Prints the length of the chat, and the speed of an answer."""
        turns = sum(message["role"] == ANSWER for message in self.messages)
        text = f"[{plural(turns, 'turn')}, {tokens:,} "
        text += "tokens" if math.isinf(self.context) else f"of {self.context:,} tokens"
        if len(times) > 2:
            # The median, because the first steps may compile.
            steps = [b - a for a, b in zip(times, times[1:], strict=False)]
            text += f", {1 / statistics.median(steps):,.1f} tokens/s"
        if full and tokens >= self.context:
            text += "; the context is full: /reset starts a new chat"
        elif full:
            text += f"; ended by --max_new_tokens={self.max_new_tokens}"
        warn(f"{text}]")
