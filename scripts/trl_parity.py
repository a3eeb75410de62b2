"""Compares preference losses and their gradients with TRL's, and writes the differences.

    python scripts/trl_parity.py --out scripts/results/trl_parity.jsonl

Needs torch, peft and trl. Tiny models of several families in float32 on a CPU. TRL has each answer
in a sequence of its own; here pairs are packed, with and without one copy of each prompt.
Differences are relative: of a gradient, the largest one to the largest value of its tensor, or to a
thousandth of the largest value of all gradients if that is larger.
"""

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

import datasets  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import peft  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

from bptjax.config import Config, TrainConfig  # noqa: E402
from bptjax.data.config import DataConfig  # noqa: E402
from bptjax.data.examples import sequence  # noqa: E402
from bptjax.data.grouping import stacked  # noqa: E402
from bptjax.data.loader import eval_loader  # noqa: E402
from bptjax.data.preferences import read_preference  # noqa: E402
from bptjax.data.references import key_of  # noqa: E402
from bptjax.data.tokenizer import ByteTokenizer  # noqa: E402
from bptjax.data.unpaired import read_unpaired, with_another  # noqa: E402
from bptjax.models.config import ModelConfig  # noqa: E402
from bptjax.models.execution import ExecutionConfig  # noqa: E402
from bptjax.models.params import param_path  # noqa: E402
from bptjax.objectives import ObjectiveConfig, dpo  # noqa: E402
from bptjax.objectives.preferences import AnswersObjective  # noqa: E402
from bptjax.objectives.reference import Referring  # noqa: E402
from bptjax.parallel.mesh import ParallelConfig, make_mesh  # noqa: E402
from bptjax.training.spec import TrainSpec  # noqa: E402
from bptjax.training.state import gather_adapters, init_state  # noqa: E402
from bptjax.training.step import answer_scorer, gradients  # noqa: E402
from bptjax.weights.hf.checkpoint import write_hf  # noqa: E402
from bptjax.weights.hf.peft import write_peft  # noqa: E402
from bptjax.weights.lora import AdapterConfig, join  # noqa: E402
from bptjax.weights.pretrained import open_pretrained  # noqa: E402

SIZES: dict[str, Any] = dict(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=None,
    bos_token_id=256,
    eos_token_id=256,
)
GROUPED: dict[str, Any] = SIZES | dict(num_key_value_heads=2)
FAMILIES = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=16),
    "gemma2": transformers.Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=7, final_logit_softcapping=5.0
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
    "phi3": transformers.Phi3Config(**GROUPED),
}
BETA, SMOOTHING, T = 0.1, 0.1, 96
# objective.type and objective.loss here.
LOSSES: dict[str, dict[str, Any]] = {
    name: dict(type="dpo", loss=name, beta=BETA) for name in dpo.LOSSES
}
LOSSES["robust"]["label_smoothing"] = SMOOTHING
WEIGHTS = dict(desirable_weight=1.5, undesirable_weight=0.7)
LOSSES["kto"] = dict(type="kto", beta=BETA, **WEIGHTS)
LOSSES |= dict(orpo=dict(type="orpo", beta=BETA), simpo=dict(type="simpo", beta=2.0, gamma=0.5))
RECORDS = [
    dict(prompt="2+3=", chosen="5", rejected="seven"),
    dict(prompt="Name a color: ", chosen="deep blue", rejected="ten"),
    dict(prompt="a", chosen="bcdefgh", rejected="xyz"),
    dict(prompt="The capital of France is", chosen=" Paris.", rejected=" Rome, I think."),
]
SINGLE = [
    dict(prompt=each["prompt"], completion=each["rejected" if i % 3 else "chosen"], label=not i % 3)
    for i, each in enumerate(RECORDS)
]


def records_of(loss: str) -> list[Any]:
    """Returns the records of a loss, as the loader reads them with the default seed."""
    if loss != "kto":
        return [read_preference(each, "text", f"record {i}") for i, each in enumerate(RECORDS)]
    alone = [read_unpaired(each, "text", f"record {i}") for i, each in enumerate(SINGLE)]
    found: list[Any] = [with_another(DataConfig().seed, alone, i) for i in range(len(alone))]
    if [each.other for each in found] != [alone[i - 1] for i in range(len(alone))]:
        raise RuntimeError("the other record is not the one before, as in TRL")
    return found


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns transformers' tokenizer with the ids of `ByteTokenizer`, for ASCII."""
    end = "<|end|>"
    vocab = {chr(i): i for i in range(256)} | {end: 256}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    first = tokenizers.processors.TemplateProcessing(f"{end} $A", special_tokens=[(end, 256)])
    made.post_processor = first
    names = dict(bos_token=end, eos_token=end, pad_token=end)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def move(model: torch.nn.Module, size: float, among: str = "") -> None:
    """Adds noise to the parameters whose name has `among`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if among in name:
                parameter.add_(size * torch.randn_like(parameter))


def load(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )


class KLBelow0(Exception):
    pass


class Theirs:
    """A family's base model, and the model to train, in files; TRL's losses and gradients."""

    def __init__(
        self, directory: Path, config: transformers.PreTrainedConfig, lora: bool, seed: int
    ):
        self.base, self.policy, self.lora = directory / "base", directory / "policy", lora
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        move(model, 0.1)
        model.save_pretrained(self.base)
        if lora:
            model = load(self.base)
            settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
            model = peft.get_peft_model(model, settings)
        move(model, 0.1 if lora else 0.02, "lora_" * lora)
        model.save_pretrained(self.policy)

    def model(self, directory: Path | None = None) -> torch.nn.Module:
        """Returns the model to train, or one with the parameters in another directory."""
        if not self.lora:
            return load(directory or self.policy)
        base = load(self.base)
        return peft.PeftModel.from_pretrained(base, directory or self.policy, is_trainable=True)

    def trainer(self, name: str, out: Path) -> Any:
        records = SINGLE if name == "kto" else RECORDS
        model, how = self.model(), dict(train_dataset=datasets.Dataset.from_list(records))
        how |= dict(processing_class=tokenizer(), model=model)
        args: dict[str, Any] = dict(output_dir=str(out), use_cpu=True, bf16=False, report_to="none")
        args |= dict(per_device_train_batch_size=len(RECORDS), gradient_checkpointing=False)
        args |= dict(disable_tqdm=True, beta=LOSSES[name]["beta"])
        if name == "orpo":
            return ORPOTrainer(args=ORPOConfig(**args), **how)
        if name == "simpo":
            more = dict(loss_type="simpo", cpo_alpha=0.0, simpo_gamma=LOSSES[name]["gamma"])
            return CPOTrainer(args=CPOConfig(**args, **more), **how)
        if name == "kto":
            return KTOTrainer(ref_model=load(self.base), args=KTOConfig(**args, **WEIGHTS), **how)
        smoothing = LOSSES[name].get("label_smoothing", 0.0)
        config = DPOConfig(**args, loss_type=[name], label_smoothing=smoothing)
        return DPOTrainer(ref_model=load(self.base), args=config, **how)

    def learn(self, name: str, out: Path) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the loss, and the gradients by the names of transformers' modules.

        Raises:
          KLBelow0: the KL of KTO is not positive, so that it would not count.
        """
        trainer = self.trainer(name, out)
        (batch,) = trainer.get_train_dataloader()
        model = trainer.model.eval()
        if name == "orpo":
            # TRL's likelihood covers the prompt too. Ours is one of answers, by pair.
            chosen, rejected, *_ = trainer.concatenated_forward(model, batch)
            loss = -chosen.mean() - trainer.odds_ratio_loss(chosen, rejected)[0].mean()
        else:
            loss = trainer.compute_loss(model, batch)
        if not all(value > 0 for value in trainer._metrics["eval"]["kl"]):
            raise KLBelow0
        loss.backward()
        return loss.item(), {
            name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None
        }


def learn(theirs: Theirs, name: str, shared: bool, out: Path) -> tuple[float, dict[str, Any]]:
    """Returns the loss here, and the gradients by the names of transformers' modules: written as
    parameters, and read by transformers."""
    pretrained = open_pretrained(ModelConfig(name_or_path=str(theirs.policy)))
    assert pretrained.family is not None
    adapter = pretrained.adapters.config if pretrained.adapters else AdapterConfig()
    config = Config(
        objective=ObjectiveConfig(**LOSSES[name], share_prompt=shared),
        adapter=adapter,
        train=TrainConfig(seq_len=T, max_steps=1, per_device_train_batch_size=1),
        execution=ExecutionConfig(q_chunk=32, k_chunk=32, ffn_chunk=32, ce_chunk=64),
    ).on("cpu")
    mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
    spec = TrainSpec(config, pretrained.config, mesh, pretrained)
    if theirs.lora:
        # They are new adapters, moved so that they differ from the reference.
        if isinstance(spec.objective, Referring):
            vars(spec)["objective"] = replace(spec.objective, reference="adapters_off")
    state = init_state(spec)
    assert isinstance(spec.objective, AnswersObjective)
    answers, documents = spec.objective.answers, records_of(name)
    byte, data = ByteTokenizer(), DataConfig(packing="best_fit")
    if "reference" in spec.encoding.fields:
        examples = [e for d in documents for e in spec.encoding.encode(d, byte, data)]
        rows = stacked(
            [sequence([example], T) for example in map(spec.references.attach, examples)]
        )
        base = open_pretrained(ModelConfig(name_or_path=str(theirs.base)))
        model = base.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        with jax.set_mesh(mesh):
            scores = answer_scorer(spec)(model, spec.layout.put(rows))
        keys = map(key_of, examples)
        spec.references.fill(dict(zip(keys, np.asarray(scores)[:, :answers], strict=True)))
    how = dict(seq_len=T, encoding=spec.encoding, batch_size=len(documents))
    (batch,) = eval_loader(documents, byte, data, **how)
    if batch["answers"].max() <= answers:
        raise RuntimeError("no two records share a sequence")
    with jax.set_mesh(mesh):
        sums, found, count = jax.jit(partial(gradients, spec))(state, spec.layout.put(batch))
    found = jax.tree.map(lambda x: x / count.astype(x.dtype), found)
    out.mkdir()
    if theirs.lora:
        adapters = gather_adapters(spec, replace(state, model=join(found, state.model)))
        write_peft(out, adapters, pretrained.family, pretrained.config, str(theirs.base))
    else:
        flat = {
            param_path(path).removesuffix(".value"): np.asarray(x)
            for path, x in jax.tree.leaves_with_path(found)
        }
        (out / "config.json").write_text((theirs.policy / "config.json").read_text())
        names = pretrained.family.names(pretrained.config)
        write_hf(out, names, lambda path, at: flat[path][at], lambda path: "float32", "5GB")
    read = theirs.model(out)
    loss = float(sums.loss) / int(count)
    return loss, {name: p.detach().numpy() for name, p in read.named_parameters()}


def open_theirs(
    directory: Path, family: str, lora: bool, loss: str
) -> tuple[Theirs, tuple[float, dict[str, np.ndarray]]]:
    """Returns TRL's side of a comparison, with the first seed of which all terms of the loss count,
    and its loss and gradients."""
    for seed in range(99):
        own = directory / f"{loss} {seed}"
        theirs = Theirs(own, FAMILIES[family], lora, seed)
        with contextlib.suppress(KLBelow0):
            return theirs, theirs.learn(loss, own / "trl")
    raise RuntimeError("KL is never positive")


def difference(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """Returns the largest relative difference of gradients."""
    largest = max(np.abs(x).max() for x in wanted.values())
    return max(
        float(np.abs(summed(found[name], x) - x).max() / max(np.abs(x).max(), 1e-3 * largest))
        for name, x in wanted.items()
    )


def rounded(x: float) -> float:
    return float(f"{x:.2g}")


def summed(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Returns the gradient of PEFT's adapter of a fused module. Here each kernel of the module has
    a copy of the adapter, and the copies are one after the other along the rank."""
    if x.shape == like.shape:
        return x
    (axis,) = (i for i in range(2) if x.shape[i] != like.shape[i])
    parts = x.shape[axis] // like.shape[axis]
    return sum(np.split(x, parts, axis), np.zeros_like(like))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    args = parser.parse_args()
    packages = {name: version(name) for name in ("jax", "torch", "transformers", "trl")}
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    rows = []
    for family in args.families:
        for lora in (False, True):
            with tempfile.TemporaryDirectory() as name:
                directory = Path(name)
                for loss in args.losses:
                    theirs, wanted = open_theirs(directory, family, lora, loss)
                    for layout in ("packed", "shared"):
                        out = directory / f"{loss} {layout}"
                        found = learn(theirs, loss, layout == "shared", out)
                        row = dict(
                            loss=loss,
                            family=family,
                            adapter="lora" if lora else "none",
                            layout=layout,
                            loss_difference=rounded(abs(found[0] / wanted[0] - 1)),
                            gradient_difference=rounded(difference(found[1], wanted[1])),
                        )
                        rows.append(row | packages)
                        print(*row.values(), flush=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
