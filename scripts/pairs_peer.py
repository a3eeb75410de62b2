"""Times DPO steps of TRL on an 8B Llama with random weights and LoRA, for comparison.

    python scripts/pairs_peer.py 7169 512 --out rows.jsonl --pairs 1 2 4 \\
        --attention sdpa cudnn flash_attention_4
    python scripts/pairs_peer.py 7169 512 --out rows.jsonl --attention cudnn --longest

Needs torch, peft and trl, and liger-kernel on a GPU; `flash_attention_4` needs flash-attn-4. The
decoder, the adapters and the tokens of a pair are those of

    python scripts/step.py 8b T --answer 512 --adapter.type=lora --objective.type=dpo

Base model, adapters and computation are in bfloat16. TRL runs as its users would have it run fast:
log-probabilities in chunks, Liger's kernels, the fused AdamW, adapters switched off for the
reference, and gradient checkpointing, or none with `--no_checkpointing`, which is faster where it
fits. Each step takes the same pairs. In TRL 1.16 each answer has a sequence with a prompt of its
own; here all sequences of a step have one length, and nothing is padded. A step is timed from the
batch on the device to the end of the optimizer's step, as in scripts/step.py.

Appends a row for each number of pairs and each attention implementation. A case that does not fit
or does not run has a row that says so. `--longest` looks for the longest prompt that fits with the
first implementation. `--tiny` takes a tiny decoder, which a CPU can train.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Memory that is free but in pieces would count as too little.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The decoder 8b of scripts/step.py.
LLAMA_8B = dict(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
ROPE_THETA = 500_000.0
TINY = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
PACKAGES = "trl", "transformers", "peft", "torch", "liger-kernel", "flash-attn-4", "triton"
END = "</s>"
# Rank of the adapters, as in adapter.r.
ADAPTER_RANK = 8
# The search for the longest prompt rounds to this number of tokens.
ROUND = 1024


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def tokenizer(vocab_size: int) -> Any:
    """Returns a tokenizer whose tokens are the decimal numbers of their ids; id 0 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {END: 0} | {str(i): i for i in range(1, vocab_size)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def records(pairs: int, prompt: int, answer: int, vocab_size: int) -> list[dict[str, str]]:
    """Returns pairs of random tokens, as texts; each answer has `answer` tokens with its end."""
    rng = random.Random(0)

    def text(tokens: int) -> str:
        return " ".join(str(rng.randrange(1, vocab_size)) for _ in range(tokens))

    def completion() -> str:
        return f" {text(answer - 1)} {END}"

    return [
        dict(prompt=text(prompt), chosen=completion(), rejected=completion()) for _ in range(pairs)
    ]


def attention_of(name: str) -> tuple[str, Any]:
    """Returns the implementation of transformers, and a context that chooses PyTorch's kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if name in kernels:
        return "sdpa", sdpa_kernel(kernels[name])
    return name, contextlib.nullcontext()


def measure(
    args: argparse.Namespace, prompt: int, pairs: int, attention: str, warmup: int, steps: int
) -> dict[str, Any]:
    """Returns seconds, memory and losses of `steps` steps after a warm-up."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    gpu = not args.tiny
    sizes: dict[str, Any] = LLAMA_8B if gpu else TINY
    config = LlamaConfig(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=2**20,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    name, kernel = attention_of(attention)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() / 2**30 if gpu else None
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=name
        )
    times: list[float] = []

    class Clock(TrainerCallback):
        """Measures the time of each step."""

        def now(self) -> float:
            if gpu:
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_step_begin(self, *args: Any, **options: Any) -> None:
            self.start = self.now()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            times.append(self.now() - self.start)
            print(f"step {len(times)}: {times[-1]:.2f} s", file=sys.stderr)

    with tempfile.TemporaryDirectory() as directory:
        trainer = DPOTrainer(
            model,
            args=DPOConfig(
                directory,
                # An epoch is a step.
                max_steps=warmup + steps,
                per_device_train_batch_size=pairs,
                max_length=None,
                learning_rate=1e-5,
                bf16=True,
                gradient_checkpointing=not args.no_checkpointing,
                activation_offloading=args.offload,
                torch_compile=args.compile,
                use_liger_kernel=gpu and not args.no_liger,
                use_cpu=not gpu,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(records(pairs, prompt, args.answer, config.vocab_size)),
            processing_class=tokenizer(config.vocab_size),
            peft_config=LoraConfig(
                r=args.rank,
                lora_alpha=args.rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            callbacks=[Clock()],
        )
        # PEFT makes adapters in float32. scripts/step.py has them in param_dtype.
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, args.adapter_dtype))
        batch = next(iter(trainer.get_train_dataloader()))
        shape, scored = list(batch["input_ids"].shape), int(batch["completion_mask"].sum())
        if shape != [2 * pairs, prompt + args.answer] or scored != 2 * pairs * args.answer:
            raise RuntimeError(f"a batch of {shape} with {scored} tokens in the loss")
        del batch
        with kernel:
            trainer.train()
    seconds = statistics.median(times[warmup:])
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    adapted = trainer.model.peft_config["default"].target_modules
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return dict(
        step_s=seconds,
        fastest_s=min(times[warmup:]),
        pairs_per_second=pairs / seconds,
        times_s=times,
        losses=losses,
        starts_at_ln2=abs(losses[0] - math.log(2)) < 1e-3,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
        held_before_gib=held,
        trained_parameters=sum(p.numel() for p in trained),
        modules=sorted({each.rpartition(".")[2] for each in adapted}),
        optimizer=str(trainer.args.optim.value),
    )


def attempt(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the measurements with `status` ok, or the reason why there are none."""
    import torch

    try:
        row = dict(status="ok") | measured()
    except torch.OutOfMemoryError:
        row = dict(status="out of memory")
    # An attention implementation can fail in any way while it compiles its kernels.
    except Exception as error:
        traceback.print_exc()
        row = dict(status=f"failed: {type(error).__name__}: {error}"[:600])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def longest(
    peak: Callable[[int], float | None], prompt: int, memory: float, tries: int = 6
) -> tuple[int, int | None]:
    """Returns the longest prompt found to fit, and the shortest one found not to fit, if any.

    Memory grows in proportion to the prompt, so the first guess follows from the peaks of two
    prompts. Further guesses are 3% apart.

    Args:
      peak: takes tokens of a prompt and returns the memory of its step; None if it does not fit.
      prompt: tokens of a prompt that fits with four times its length.
      memory: size of the memory.
    """
    low, high = peak(prompt), peak(4 * prompt)
    if low is None or high is None:
        raise ValueError(f"prompt={prompt}: four times as many tokens must fit; use fewer")
    per_token = (high - low) / (3 * prompt)
    guess = int(4 * prompt + (memory - high) / per_token) // ROUND * ROUND
    fits, too_long = 4 * prompt, None
    change = max(ROUND, int(0.03 * guess) // ROUND * ROUND)
    for _ in range(tries):
        if guess <= fits or (too_long is not None and guess >= too_long):
            break
        if peak(guess) is None:
            too_long, guess = guess, guess - change
        else:
            fits, guess = guess, guess + change
    return fits, too_long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", type=int, help="tokens of each prompt")
    parser.add_argument("answer", type=int, help="tokens of each answer")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1], help="pairs of a step")
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["sdpa"],
        help="sdpa, or its kernels cudnn and flash; or another implementation of transformers",
    )
    parser.add_argument("--steps", type=int, default=3, help="0 with --longest times no steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed steps")
    parser.add_argument("--rank", type=int, default=ADAPTER_RANK, help="rank of the adapters")
    parser.add_argument("--adapter_dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--no_liger", action="store_true", help="without Liger's kernels")
    parser.add_argument("--no_checkpointing", action="store_true", help="save all activations")
    parser.add_argument("--offload", action="store_true", help="TRL's activation_offloading")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--longest", action="store_true", help="find the longest prompt that fits")
    parser.add_argument("--tiny", action="store_true", help="a tiny decoder on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    import datasets
    import torch

    datasets.disable_progress_bars()

    def row(prompt: int, pairs: int, attention: str, warmup: int, steps: int) -> dict[str, Any]:
        """Appends the row of a case to the file, and returns it."""
        made: dict[str, Any] = dict(
            peer="trl",
            prompt=prompt,
            answer=args.answer,
            pairs=pairs,
            attention=attention,
            liger=not (args.no_liger or args.tiny),
            rank=args.rank,
            adapter_dtype=args.adapter_dtype,
            checkpointing=not args.no_checkpointing,
            offload=args.offload,
            compiled=args.compile,
            tiny=args.tiny,
            warmup=warmup,
            steps=steps,
        )
        made |= attempt(lambda: measure(args, prompt, pairs, attention, warmup, steps))
        made |= dict(
            device="cpu" if args.tiny else torch.cuda.get_device_name(), versions=versions()
        )
        print(json.dumps(made), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(made) + "\n")
        return made

    if args.longest:
        pairs, attention = args.pairs[0], args.attention[0]
        memory = torch.cuda.mem_get_info()[0] / 2**30
        fits, too_long = longest(
            lambda prompt: row(prompt, pairs, attention, 0, 1).get("peak_gib"), args.prompt, memory
        )
        print(f"prompts of {fits} tokens fit, of {too_long} do not", file=sys.stderr)
        if args.steps:
            row(fits, pairs, attention, args.warmup, args.steps)
        return
    for pairs in args.pairs:
        for attention in args.attention:
            row(args.prompt, pairs, attention, args.warmup, args.steps)


if __name__ == "__main__":
    main()
