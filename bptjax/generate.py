"""`bptjax generate`: text from a Hugging Face checkpoint, a converted one, or a run."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bptjax.cli import launch
from bptjax.config import check_seed
from bptjax.data.templates import chat_prompt
from bptjax.data.tokenizer import (
    Tokenizer,
    add_tokens,
    has_tokenizer,
    load_tokenizer,
    vocabulary_warning,
)
from bptjax.generation import Sampling, generate
from bptjax.metrics import printable
from bptjax.models.config import EncoderConfig, Execution, ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.parallel.mesh import select_devices
from bptjax.pretrained import Pretrained, open_pretrained, resolve_checkpoint


def load(name: str, *, tokenizer: str | None, device: str, dtype: str | None):
    """(decoder, tokenizer, dtype) of a checkpoint, on the first device. The dtype is the
    parameters' own if left out.

    Raises:
      ValueError: what is wrong with it, in one line.
    """
    first = select_devices(device)[0]
    model = open_pretrained(ModelConfig(name_or_path=name))
    if isinstance(model.config, EncoderConfig):
        raise ValueError(f"{name} is an encoder; it writes no text")
    if model.left_out:
        print(model.left_out, file=sys.stderr)
    kind = jnp.dtype(dtype or model.source.specs["embedding"].dtype)
    own = None if tokenizer else model.config.V
    text = load_tokenizer(tokenizer or tokenizer_of(name, model), own)
    add_tokens(text, model.config.add_tokens)
    if model.config.V < text.vocab_size:
        raise ValueError(
            f"the tokenizer's vocabulary of {text.vocab_size} is not of {name}, which has "
            f"{model.config.V}"
        )
    if tokenizer and (warning := vocabulary_warning(text, tokenizer_of(name, model))):
        print(warning, file=sys.stderr)
    return model.load(jax.sharding.SingleDeviceSharding(first), kind), text, kind


def warn_of_length(config: ModelConfig, length: int) -> None:
    """Prints one line on stderr if text of `length` tokens goes beyond the model's positions."""
    if config.exceeds_positions(length):
        print(
            f"warning: {length:,} tokens are beyond the {config.max_position_embeddings:,} "
            "positions that the model was made for; expect worse text there",
            file=sys.stderr,
        )


def tokenizer_of(name: str, model: Pretrained) -> Path:
    """Returns the directory of a checkpoint's tokenizer: that of a run or an adapter if it has one,
    or else what the model came with."""
    here = resolve_checkpoint(name)
    return here if has_tokenizer(here) else model.sidecars or here


def continuations(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[np.ndarray],
    *,
    stop_strings: list[str] = [],  # noqa: B006 (not changed)
    **options,
) -> Iterator[list[str]]:
    """The texts so far that follow the prompts, after each token; a text ends before a stop string
    or an end-of-text token.
    """
    stop = tokenizer.stop_ids
    tokens: list[list[int]] = [[] for _ in prompts]
    texts, ended = ["" for _ in prompts], [False] * len(prompts)
    for new in generate(model, prompts, stop=stop, **options):
        for i, token in enumerate(new.tolist()):
            if ended[i] or token < 0:
                continue
            if token in stop:
                ended[i] = True
                continue
            tokens[i].append(token)
            texts[i] = tokenizer.decode(tokens[i])
            found = [at for s in stop_strings if (at := texts[i].find(s)) >= 0]
            if found:
                texts[i], ended[i] = texts[i][: min(found)], True
        yield list(texts)
        if all(ended):
            return


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return launch("generate", argv)


def run(args: Namespace) -> int:
    """Prints continuations of the prompts, one as it is written, several when all are done.

    Raises:
      ValueError, OSError: the flags, a file or the checkpoint are wrong, in one line.
    """
    for name in ("max_new_tokens", "prefill_chunk"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: must be at least 1")
    if "" in args.stop:
        raise ValueError("--stop: must not be empty")
    check_seed("--seed", args.seed)
    texts = args.prompt + [_text(file) for file in args.prompt_file]
    if not texts:
        raise ValueError("--prompt or --prompt_file must be given")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    model, tokenizer, dtype = load(
        args.model, tokenizer=args.tokenizer, device=args.device, dtype=args.dtype
    )
    prompts = [
        chat_prompt(text, tokenizer) if args.chat else tokenizer.encode_prompt(text)
        for text in texts
    ]
    warn_of_length(model.config, max(map(len, prompts)) + args.max_new_tokens)
    stream = continuations(
        model,
        tokenizer,
        prompts,
        stop_strings=args.stop,
        new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        prefill_chunk=args.prefill_chunk,
        dtype=dtype,
        execution=Execution(),
    )
    _show(stream, texts, args.stop)
    return 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _show(stream: Iterator[list[str]], prompts: list[str], stops: list[str]) -> None:
    """One text as it is written; several, each under its prompt, when all are."""
    shown, texts = 0, [""]
    # What might turn into a stop string, or is half a character, waits.
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
