"""`bptjax convert`: converts checkpoints and adapters from and to Hugging Face, PEFT and GGUF."""

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bptjax.cli.main import launch, warn
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import select_devices
from bptjax.weights.adapter_export import export_adapter, export_note
from bptjax.weights.conversion import merge_adapter, to_bptjax, to_hf, trained_dtype
from bptjax.weights.gguf.export import to_gguf
from bptjax.weights.gguf.lora import lora_to_gguf
from bptjax.weights.gguf.modelfile import serving_lines
from bptjax.weights.gguf.reading import from_gguf
from bptjax.weights.hub import check_hub_name, push
from bptjax.weights.pretrained import Pretrained, open_pretrained, resolve_checkpoint
from bptjax.weights.verification import verify

Note = Callable[[Pretrained, Namespace], str]


@dataclass(frozen=True)
class Conversion:
    """A conversion.

    Attributes:
      convert: writes the directory or file; takes the conversion's own flags as keywords.
      note: returns a line about the result; may be empty.
      exports: writes files of Hugging Face or PEFT, which cannot name an attention pattern.
      options: names of the flags that `convert` takes.
    """

    convert: Callable[..., Pretrained]
    note: Note = lambda model, args: ""
    exports: bool = True
    options: tuple[str, ...] = ()


def _kept_dtype(model: Pretrained, args: Namespace) -> str:
    name = None if args.dtype else trained_dtype(model)
    text = "as in the checkpoint; --dtype float32 keeps the run's"
    return f"weights in {name}, {text}" if name else ""


def _to_gguf(source: str, out: Path, *, lora: bool, type: str, pre: str | None) -> Pretrained:
    if lora:
        return lora_to_gguf(source, out, type=type, warn=warn)
    return to_gguf(source, out, type=type, pre=pre, warn=warn)


def _serving(model: Pretrained, args: Namespace) -> str:
    return "\n".join(serving_lines(args.out, model.adapters if args.lora else None))


HF_OPTIONS = "dtype", "max_shard_size", "experts"
# Conversions by name, as in `main.convert`.
CONVERSIONS = {
    "hf-to-bptjax": Conversion(to_bptjax, exports=False),
    "bptjax-to-hf": Conversion(partial(to_hf, warn=warn), _kept_dtype, options=HF_OPTIONS),
    "merge-adapter": Conversion(partial(merge_adapter, warn=warn), options=HF_OPTIONS),
    "export-adapter": Conversion(
        export_adapter,
        lambda model, args: export_note(model, args.out, args.format),
        options=("format",),
    ),
    "to-gguf": Conversion(_to_gguf, _serving, options=("lora", "type", "pre")),
    "from-gguf": Conversion(from_gguf, exports=False, options=("dtype", "max_shard_size")),
}


main = partial(launch, "convert")


def run(args: Namespace) -> int:
    """Converts `args.source` to the new file or directory `args.out`. Returns 1 if `--verify` finds
    a difference between the models.

    Raises:
      ValueError, OSError: one line about the wrong flag or source; nothing is written.
      NotUploaded: the result is written, but the hub did not take it.
    """
    conversion, verified = CONVERSIONS[args.conversion], getattr(args, "verify", False)
    if verified and importlib.util.find_spec("torch") is None:
        raise ValueError("--verify: must have torch, which is not installed; pip install torch")
    hub = getattr(args, "push_to_hub", None)
    if hub is not None:
        check_hub_name(hub)
    select_devices("cpu")
    options = {name: getattr(args, name) for name in conversion.options}
    model = conversion.convert(args.source, args.out, **options)
    notes = [model.left_out]
    pattern = model.config.attention_pattern
    if pattern is not None and (verified or conversion.exports):
        notes.append(
            f"transformers computes full attention in place of model.attention_pattern={pattern}; "
            "bptjax reads the pattern" + ("; not verified" if verified else "")
        )
        verified = False
    notes += [conversion.note(model, args), f"written: {args.out}"]
    print("\n".join(note for note in notes if note))
    if verified and not _verified(args, conversion):
        return 1
    if hub is not None:
        print(f"uploaded: {push(args.out, hub)}")
    return 0


def _verified(args: Namespace, conversion: Conversion) -> bool:
    """Compares the result with transformers, and prints the differences."""
    hf, ours = resolve_checkpoint(args.source), args.out
    if conversion.exports:
        # Experts in MXFP4 differ from the source's.
        hf, ours = args.out, args.out if getattr(args, "experts", None) else args.source
    model = open_pretrained(ModelConfig(name_or_path=str(ours)))
    same, line = verify(hf, model, getattr(args, "dtype", None))
    print(line)
    return same
