"""Generates text with a Hugging Face checkpoint, a converted checkpoint, or a run: `bptjax
generate` on the command line, `bptjax.generate` in Python."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bptjax.cli.main import launch, warn
from bptjax.data.templates import chat_prompt, describe_clock_and_chance, opening
from bptjax.data.tokenizer import Tokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.generation import continuations, length_warning
from bptjax.models.sampling import Sampling, choose_sampling
from bptjax.parsing.keys import check_seed
from bptjax.run.metrics import printable
from bptjax.run.output import plural
from bptjax.weights.loading import load_opened, open_decoder

log = logging.getLogger("bptjax")
Prompts = TypeVar("Prompts", str, list[str])


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Prompts,
    *,
    chat: bool = False,
    system: str | None = None,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
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
      system: system message before each prompt; needs `chat`.
      max_new_tokens: largest number of new tokens per text.
      temperature, top_k, top_p, min_p, repetition_penalty: see `sampling.Sampling`. The defaults
        come from the checkpoint's generation_config.json; see `sampling.choose_sampling`.
      stop: strings that end a text and are not part of it.
      seed: sampling seed.
      prefill_chunk: prompt tokens processed at a time.
      dtype: dtype of the computation and the cache. By default the dtype of the parameters.

    Raises:
      ValueError: an option is out of range, or a prompt is empty or too long.
    """
    stop = [stop] if isinstance(stop, str) else stop
    check_options(max_new_tokens, prefill_chunk, stop, seed)
    sampling, line = choose_sampling(
        tokenizer.generation_config,
        log.warning,
        chat=chat,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    log.info(line)
    encoded = _encode(
        [prompts] if isinstance(prompts, str) else prompts, tokenizer, chat, system, log.warning
    )
    _warn_of_length(model.config, encoded, max_new_tokens, log.warning)
    *_, texts = continuations(
        model,
        tokenizer,
        encoded,
        new_tokens=max_new_tokens,
        sampling=sampling,
        stop_strings=stop,
        seed=seed,
        prefill_chunk=prefill_chunk,
        dtype=jnp.dtype(dtype or model.head_matrix.dtype),
    )
    return cast(Prompts, texts[0] if isinstance(prompts, str) else texts)


def _encode(
    texts: list[str],
    tokenizer: Tokenizer,
    chat: bool,
    system: str | None,
    warn: Callable[[str], None],
) -> list[np.ndarray]:
    """Returns the token ids of the prompts. Warns if a chat template reads the clock.

    Raises:
      ValueError: a prompt has no tokens, or `system` is set without `chat`.
    """
    if system is not None and not chat:
        raise ValueError("system: must have chat=true; only chats have a system message")
    prompts = [
        chat_prompt(opening(text, system), tokenizer) if chat else tokenizer.encode_prompt(text)
        for text in texts
    ]
    if not all(map(len, prompts)):
        raise ValueError(f"prompt {list(map(len, prompts)).index(0) + 1}: must not be empty")
    for line in describe_clock_and_chance(tokenizer) if chat else ():
        warn(line)
    return prompts


def _warn_of_length(
    config: ModelConfig, prompts: list[np.ndarray], new_tokens: int, warn: Callable[[str], None]
) -> int:
    """Returns the largest number of tokens of a text. Warns if that is too long for the model."""
    longest = max(map(len, prompts), default=0) + new_tokens
    if line := length_warning(config, longest):
        warn(line)
    return longest


def check_options(
    max_new_tokens: int, prefill_chunk: int, stop: Sequence[str], seed: int, prefix: str = ""
) -> None:
    """Checks the options. Errors put `prefix` in front of option names.

    Raises:
      ValueError: an option is out of range.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{prefix}{name}={value}: must be at least 1")
    if "" in stop:
        raise ValueError(f"{prefix}stop: must not be empty")
    check_seed(f"{prefix}seed", seed)


main = partial(launch, "generate")


def run(args: Namespace) -> int:
    """Prints continuations: of a single prompt as it is generated, of several prompts at the end.

    Raises:
      ValueError, OSError: one line about the wrong flag, file or checkpoint.
    """
    check_options(args.max_new_tokens, args.prefill_chunk, args.stop, args.seed, prefix="--")
    texts = args.prompt + [_text(file) for file in args.prompt_file]
    if not texts:
        raise ValueError("--prompt or --prompt_file must be given")
    pretrained, tokenizer = open_decoder(args.model, args.tokenizer, warn)
    chosen = {f.name: getattr(args, f.name) for f in fields(Sampling)}
    sampling, line = choose_sampling(tokenizer.generation_config, warn, chat=args.chat, **chosen)
    warn(line)
    prompts = _encode(texts, tokenizer, args.chat, args.system, warn)
    longest = _warn_of_length(pretrained.config, prompts, args.max_new_tokens, warn)
    warn(f"loading {args.model}")
    cached = len(prompts), longest
    model = load_opened(
        pretrained, args.dtype, args.device, warn, tp=args.tp, sp=args.sp, cached=cached
    )
    dtype = jnp.dtype(args.dtype or model.head_matrix.dtype)
    tokens = sum(map(len, prompts))
    warn(f"compiling, then reading {plural(tokens, 'token')} of prompts, in {dtype}")
    stream = continuations(
        model,
        tokenizer,
        prompts,
        new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop_strings=args.stop,
        seed=args.seed,
        prefill_chunk=args.prefill_chunk,
        dtype=dtype,
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
    """Prints a single text as it is generated, or several at the end, each below its prompt."""
    if len(prompts) == 1:
        for _ in show_growing((texts[0] for texts in stream), stops):
            pass
        return
    *_, texts = stream
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"== {printable(prompt[:60])}\n{printable(text)}")


def show_growing(stream: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Prints a text as it grows, and yields it at each step."""
    shown, text = 0, ""
    # Hold back the end of the text: it may be part of a stop string or of a character.
    wait = max((len(s) - 1 for s in stops), default=0)
    for text in stream:
        end = max(len(text.rstrip("\ufffd")) - wait, shown)
        print(printable(text[shown:end]), end="", flush=True)
        shown = end
        yield text
    print(printable(text[shown:]))
