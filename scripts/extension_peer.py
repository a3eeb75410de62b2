"""Trains a Llama with transformers and Liger on the batches of a bptjax run, for comparison.

    python scripts/extension_peer.py --dump batches.npz --config configs/smollm2_64k.yaml \\
        --model.name_or_path=DIR --data.path=train.jsonl [--group.key=value ...]
    python scripts/extension_peer.py --train batches.npz --model DIR --out rows.jsonl \\
        [--attention flex_attention] [--checkpointing] [--no_liger] [--steps 20]

`--dump` writes the batches and settings of a run on one device, in the run's order; it takes a CPU.
`--train` needs torch and transformers alone, and liger-kernel on a GPU. It writes a line of JSON
for each step and each evaluation, and a last one with speed and memory. On a GPU, flex_attention
skips blocks of other documents, but sdpa reads a mask [T, T]; on a CPU, only sdpa can train.

As in a run with param_dtype=float32, the optimizer holds float32 parameters. The model computes
with copies of them in compute_dtype, so that the residual stream has this dtype too, which autocast
would leave in float32. Gradients of micro-batches are summed in float32 and divided by the number
of loss-bearing tokens of the step. One difference remains: in bfloat16, the copies of the norms'
scales are rounded too. Documents are told apart by positions that restart at 0, from which
transformers makes a block-diagonal mask.
"""

import argparse
import json
import platform
import subprocess
import tempfile
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

# Labels that are the next token of the sequence, in the file. Runs of one value compress well.
NEXT, IGNORED = -1, -100
# Values of keys that the peer honors, besides those in the file.
ONLY = {
    "objective.type": ("auto", "next_token"),
    "adapter.type": ("none",),
    "model.embedding_dropout": (None, 0.0),
    "model.attention_dropout": (None, 0.0),
    "model.residual_dropout": (None, 0.0),
    "train.param_dtype": ("float32",),
    "train.linear": (None,),
    "train.z_loss": (0.0,),
    "optimizer.type": ("adamw",),
    "optimizer.clip": ("exact",),
    "optimizer.state_dtype": (None, "float32"),
}
# First steps, whose speed does not count: kernels are compiled and tuned.
WARM_UP = 3
PACKAGES = "torch", "transformers", "liger-kernel", "triton"


def positions_of(segments: np.ndarray) -> np.ndarray:
    """Returns the position of each token in its document; 0 for padding, whose segment is 0."""
    at = np.broadcast_to(np.arange(segments.shape[-1]), segments.shape)
    starts = np.diff(segments.astype(np.int64), axis=-1, prepend=-1) != 0
    start = np.maximum.accumulate(np.where(starts, at, 0), axis=-1)
    return np.where(segments == 0, 0, at - start)


def dump(file: Path, steps: int | None, keys: list[str]) -> None:
    """Writes the batches `[micro-batch, B, T]` and the settings of a run.

    Raises:
      ValueError: a key has a value that the peer does not honor.
    """
    from bptjax.config_parser import parse
    from bptjax.optim.schedule import learning_rate
    from bptjax.parsing.keys import flatten
    from bptjax.training.setup import setup

    config = parse(keys)
    config = config.on("cpu" if config.device == "cpu" else "gpu")
    for key, values in ONLY.items():
        if (value := flatten(config)[key]) not in values:
            raise ValueError(f"{key}={value}: must be {values[0]}, because the peer has no other")
    with tempfile.TemporaryDirectory() as directory:
        run = setup(replace(config, device="cpu", run_dir=f"{directory}/run"))
        if not len(run.held_out):
            raise ValueError("data: must have held-out documents; set data.eval_fraction")
        spec, optimizer, train = run.spec, run.config.optimizer, run.config.train
        rates = learning_rate(optimizer, spec.steps)
        A = train.gradient_accumulation_steps
        settings = dict(
            rope_parameters={"rope_type": "default"} | spec.model.rope_parameters,
            max_position_embeddings=spec.model.max_position_embeddings,
            compute_dtype=train.compute_dtype,
            micro_batches=A,
            eval_steps=train.eval_steps,
            rates=[np.asarray(rates(step)).item() for step in range(steps or spec.steps)],
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_epsilon,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
        )
        batches = {
            "train": [spec.layout.put(next(run.batches), A) for _ in settings["rates"]],
            "held_out": [spec.layout.put(batch) for batch in run.evaluation],
        }
        run.batches.close()
    arrays: dict[str, Any] = {}
    for name, found in batches.items():
        if found[0].keys() != {"tokens", "labels", "segments", "positions"}:
            raise ValueError(f"data: must be texts, not examples of {sorted(found[0])}")
        tokens, labels, segments, positions = (
            np.concatenate([np.asarray(batch[field]) for batch in found])
            for field in ("tokens", "labels", "segments", "positions")
        )
        if (positions != positions_of(segments)).any():
            raise ValueError("data: positions must restart with each document")
        small = np.uint16 if spec.model.V <= 2**16 else np.int32
        arrays[f"{name}_tokens"], arrays[f"{name}_segments"] = tokens.astype(small), segments
        arrays[f"{name}_labels"] = np.where(labels == np.roll(tokens, -1, -1), NEXT, labels)
    np.savez_compressed(file, settings=json.dumps(settings), **arrays)


def read(arrays: Any, name: str) -> dict[str, np.ndarray]:
    """Returns the batches `[micro-batch, B, T]` of this name, int64."""
    fields = "tokens", "labels", "segments"
    tokens, labels, segments = (arrays[f"{name}_{field}"].astype(np.int64) for field in fields)
    labels = np.where(labels == NEXT, np.roll(tokens, -1, -1), labels)
    return dict(tokens=tokens, labels=labels, segments=segments, positions=positions_of(segments))


def part(batches: dict[str, np.ndarray], index: Any) -> dict[str, np.ndarray]:
    return {name: x[index] for name, x in batches.items()}


class Peer:
    """A model of transformers with an optimizer of torch."""

    def __init__(self, directory: Path, settings: dict[str, Any], attention: str, liger: bool):
        import torch
        from transformers import AutoConfig, LlamaForCausalLM

        self.settings, self.extra = settings, {}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = AutoConfig.from_pretrained(directory)
        if config.model_type != "llama":
            raise ValueError(f"--model: model_type={config.model_type}: must be llama")
        config.rope_parameters = settings["rope_parameters"]
        config.max_position_embeddings = settings["max_position_embeddings"]
        config.attention_dropout = 0.0
        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
            self.extra["accum_dtype"] = torch.float32  # Of the output embedding's gradient.
        load = dict(config=config, dtype=torch.float32, attn_implementation=attention)
        self.model: Any = LlamaForCausalLM.from_pretrained(directory, **load)
        self.model.to(self.device).train()  # pyrefly: ignore[bad-argument-type]
        head = self.model.lm_head.weight
        modules = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear)]
        decayed = {id(m.weight) for m in modules if m.weight is not head}
        self.copies: list[Any] = list(self.model.parameters())
        self.parameters: list[Any] = [p.detach().clone() for p in self.copies]
        groups: list[dict[str, Any]] = [
            dict(params=[], weight_decay=settings["weight_decay"] * x) for x in (0, 1)
        ]
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            groups[id(copy) in decayed]["params"].append(parameter)
            # Not `model.to`, which would round the frequencies of rotary positions too.
            copy.data = parameter.to(getattr(torch, settings["compute_dtype"]), copy=True)
        how = dict(betas=settings["betas"], eps=settings["eps"], fused=self.device.type == "cuda")
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **how)

    def loss(self, batch: dict[str, np.ndarray], divisor: int) -> Any:
        """Returns the sum of the losses of a micro-batch `[B, T]`, divided by `divisor`."""
        import torch

        tokens, labels, positions = (
            torch.from_numpy(batch[name]).to(self.device)
            for name in ("tokens", "labels", "positions")
        )
        inputs = dict(input_ids=tokens, position_ids=positions, use_cache=False)
        inputs |= dict(labels=labels, shift_labels=labels, num_items_in_batch=divisor)
        return self.model(**inputs, **self.extra).loss

    def step(self, batches: dict[str, np.ndarray], rate: float) -> float:
        """Takes an optimizer step over micro-batches `[A, B, T]`. Returns its loss, in nats per
        loss-bearing token."""
        import torch

        count, total = max(int((batches["labels"] != IGNORED).sum()), 1), 0.0
        for i in range(len(batches["labels"])):
            loss = self.loss(part(batches, i), count)
            loss.backward()
            total += loss.detach()
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                new, copy.grad = copy.grad.float(), None
                parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)
        if most := self.settings["max_grad_norm"]:
            gradients = [p.grad for p in self.parameters]
            factor = (most / torch.nn.utils.get_total_norm(gradients)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.parameters)
        return float(total)  # Waits for the device.


def train(args: argparse.Namespace) -> None:
    """Trains on the batches of a file, and writes rows."""
    import torch

    with np.load(args.train) as arrays:
        settings = json.loads(str(arrays["settings"]))
        training, held_out = read(arrays, "train"), read(arrays, "held_out")
    peer = Peer(args.model, settings, args.attention, args.liger)
    if args.checkpointing:
        how = dict(use_reentrant=False)
        peer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    cuda, A = peer.device.type == "cuda", settings["micro_batches"]
    rates = settings["rates"][: args.steps]
    about = dict(implementation="transformers", attention=args.attention, liger=args.liger)
    about |= dict(checkpointing=args.checkpointing, T=training["tokens"].shape[-1])
    about |= dict(sequences=A * training["tokens"].shape[1], dtype=settings["compute_dtype"])

    def write(**row: Any) -> None:
        with args.out.open("a") as file:
            file.write(json.dumps(about | row) + "\n")

    @torch.no_grad()
    def evaluate(step: int) -> None:
        each = [float(peer.loss(part(held_out, i), 1)) for i in range(len(held_out["labels"]))]
        write(step=step, held_out_loss=sum(each) / int((held_out["labels"] != IGNORED).sum()))

    speeds: list[float] = []
    status = "ok"
    try:
        evaluate(0)
        for done, rate in enumerate(rates, 1):
            batches = part(training, slice((done - 1) * A, done * A))
            start = time.perf_counter()
            loss = peer.step(batches, rate)
            seconds = time.perf_counter() - start
            tokens = int((batches["segments"] != 0).sum())
            write(step=done, loss=loss, seconds=round(seconds, 4), tokens=tokens)
            speeds.append(tokens / seconds)
            every = settings["eval_steps"]
            if done == len(rates) or (every and done % every == 0):
                evaluate(done)
    except torch.OutOfMemoryError:
        status = "out of memory"
    counted = speeds[WARM_UP:]
    quartiles = np.quantile(counted, [0.25, 0.5, 0.75]).round().tolist() if counted else [None] * 3
    root = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(root, capture_output=True, text=True).stdout.strip() or None
    write(
        status=status,
        steps=len(speeds),
        tokens_per_second=quartiles[1],
        quartiles=quartiles[::2],
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        device=torch.cuda.get_device_name() if cuda else "cpu",
        versions={"Python": platform.python_version()} | {x: installed(x) for x in PACKAGES},
        commit=args.commit or commit,
    )


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--dump", type=Path, help="file of batches to write, .npz")
    mode.add_argument("--train", type=Path, help="file of batches to train on")
    parser.add_argument("--model", type=Path, help="Hugging Face directory, with --train")
    parser.add_argument("--out", type=Path, help="file of rows, .jsonl, with --train")
    parser.add_argument("--steps", type=int, help="first steps of the run alone")
    parser.add_argument("--attention", choices=["sdpa", "flex_attention"], default="sdpa")
    parser.add_argument("--checkpointing", action="store_true", help="recompute the layers")
    parser.add_argument("--no_liger", dest="liger", action="store_false")
    parser.add_argument("--commit", help="commit of the source, if it is not in a git repository")
    args, keys = parser.parse_known_args(argv)
    if args.dump:
        dump(args.dump, args.steps, keys)
    elif keys or not (args.model and args.out):
        parser.error(f"--train: must have --model and --out, and no other keys: {keys}")
    else:
        train(args)


if __name__ == "__main__":
    main()
