"""Generates text with a Hugging Face checkpoint, a converted one, or a run: `bptjax generate` on
the command line, `bptjax.generate` in Python.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax.numpy as jnp
from jax.typing import DTypeLike

from bptjax.cli import launch, warn
from bptjax.command_line import make_callable
from bptjax.config import check_seed
from bptjax.data.templates import chat_prompt, describe_clock_and_chance
from bptjax.data.tokenizer import Tokenizer
from bptjax.generation import Sampling, continuations, length_warning
from bptjax.loading import load_decoder
from bptjax.metrics import printable
from bptjax.models.decoder import Decoder

log = logging.getLogger("bptjax")
Prompts = TypeVar("Prompts", str, list[str])


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Prompts,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    prefill_chunk: int = 2048,
    dtype: DTypeLike | None = None,
) -> Prompts:
    """Returns the text that follows the prompt, or a list of texts for a list of prompts.

    With temperature 0, the text of a prompt does not depend on the other prompts.

    Args:
      model, tokenizer: results of `bptjax.load`.
      chat: whether the prompts are user messages for the chat template.
      max_new_tokens: largest number of new tokens per text.
      temperature, top_k, top_p, repetition_penalty: see `generation.Sampling`.
      stop: strings that end a text and are not part of it.
      seed: sampling seed.
      prefill_chunk: prompt tokens processed at a time.
      dtype: dtype of the computation and the cache. By default the dtype of the parameters.

    Raises:
      ValueError: an option is out of range, or a prompt is empty or too long.
    """
    stop = [stop] if isinstance(stop, str) else stop
    _check(max_new_tokens, prefill_chunk, stop, seed)
    texts = _stream(
        model,
        tokenizer,
        [prompts] if isinstance(prompts, str) else prompts,
        log.warning,
        chat=chat,
        new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, repetition_penalty),
        stop_strings=stop,
        seed=seed,
        prefill_chunk=prefill_chunk,
        dtype=dtype,
    )
    *_, found = texts
    return cast(Prompts, found[0] if isinstance(prompts, str) else found)


make_callable(__name__, generate)


def _stream(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: list[str],
    warn: Callable[[str], None],
    *,
    chat: bool,
    new_tokens: int,
    dtype: DTypeLike | None,
    **options: Any,
) -> Iterator[list[str]]:
    """Returns `continuations` of the texts. Warns if they may get too long for the model."""
    prompts = [
        chat_prompt(text, tokenizer) if chat else tokenizer.encode_prompt(text) for text in texts
    ]
    for line in describe_clock_and_chance(tokenizer) if chat else ():
        warn(line)
    if line := length_warning(model.config, max(map(len, prompts)) + new_tokens):
        warn(line)
    dtype = jnp.dtype(dtype or model.head_matrix.dtype)
    return continuations(model, tokenizer, prompts, new_tokens=new_tokens, dtype=dtype, **options)


def _check(
    max_new_tokens: int, prefill_chunk: int, stop: Sequence[str], seed: int, prefix: str = ""
) -> None:
    """Checks options. `prefix` precedes their names in errors.

    Raises:
      ValueError: an option is out of range.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{prefix}{name}={value}: must be at least 1")
    if "" in stop:
        raise ValueError(f"{prefix}stop: must not be empty")
    check_seed(f"{prefix}seed", seed)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return launch("generate", argv)


def run(args: Namespace) -> int:
    """Prints continuations of the prompts: of a single prompt as it is generated, of several at the
    end.

    Raises:
      ValueError, OSError: one line about the wrong flag, file or checkpoint.
    """
    _check(args.max_new_tokens, args.prefill_chunk, args.stop, args.seed, prefix="--")
    texts = args.prompt + [_text(file) for file in args.prompt_file]
    if not texts:
        raise ValueError("--prompt or --prompt_file must be given")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    model, tokenizer, _ = load_decoder(
        args.model,
        tokenizer=args.tokenizer,
        device=args.device,
        dtype=args.dtype,
        tp=args.tp,
        sp=args.sp,
        warn=warn,
    )
    stream = _stream(
        model,
        tokenizer,
        texts,
        warn,
        chat=args.chat,
        new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop_strings=args.stop,
        seed=args.seed,
        prefill_chunk=args.prefill_chunk,
        dtype=args.dtype,
    )
    _show(stream, texts, args.stop)
    return 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise ValueError(f"--prompt_file={file}: must be a file ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--prompt_file={file}: must be in UTF-8 ({error})") from error


def _show(stream: Iterator[list[str]], prompts: list[str], stops: list[str]) -> None:
    """Prints a single text as it is generated, several at the end, each below its prompt."""
    shown, texts = 0, [""]
    # The end of the text so far may be part of a stop string or of a character.
    wait = max((len(s) - 1 for s in stops), default=0)
    for texts in stream:
        if len(texts) == 1:
            end = max(len(texts[0].rstrip("\ufffd")) - wait, shown)
            print(printable(texts[0][shown:end]), end="", flush=True)
            shown = end
    if len(texts) == 1:
        print(printable(texts[0][shown:]))
        return
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"== {printable(prompt[:60])}\n{printable(text)}")


if __name__ == "__main__":
    sys.exit(main())
