"""Keys of the model that a config may set beside a checkpoint."""

import json

import pytest

from bptjax.cli import convert
from bptjax.cli.train import main
from bptjax.config_parser import parse
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.config_checks import OVERRIDABLE
from bptjax.parsing.keys import flatten, replace_keys
from bptjax.run.metrics import read_metrics
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import config
from weights.hf.loading import random_base

# A value of each key that differs from the default, and from the checkpoints' values.
VALUES = {
    "rope_parameters": {"rope_type": "linear", "factor": 4.0},
    "max_position_embeddings": 99,
    "extend_to": 65536,
    "attention_pattern": {"type": "window", "window": 8},
    "embedding_dropout": 0.25,
    "attention_dropout": 0.25,
    "residual_dropout": 0.25,
    "experts.aux_loss": 0.125,
    "experts.z_loss": 0.125,
    "init_std": 0.5,
    "add_tokens": ["<tool>"],
}
OF_EXPERTS = "experts.aux_loss", "experts.z_loss"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name in ("llama", "qwen3_moe"):
        raw = config(name)
        raw.vocab_size = ByteTokenizer.vocab_size
        raw.output_router_logits = False
        ByteTokenizer().save(random_base(folder / name, raw))
    (folder / "text.txt").write_text(
        "".join(f"{i} plus {i % 7} is {i + i % 7}. " for i in range(99))
    )
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
# `extend_theta` belongs to `extend_to`.
@pytest.mark.parametrize("key", sorted({*OVERRIDABLE} - {"name_or_path", "extend_theta"}))
def test_every_key_can_be_set_where_the_checkpoint_has_its_part(key, name, bases):
    value = VALUES[key]
    flags = [f"--model.name_or_path={bases / name}", f"--model.{key}={json.dumps(value)}"]
    wanted = parse(flags).model
    if name == "llama" and key in OF_EXPERTS:
        with pytest.raises(ValueError, match=f"model.{key}=0.125: .* has no experts; leave it out"):
            open_pretrained(wanted)
        return
    # `extend_to` sets other keys.
    found = flatten(open_pretrained(wanted).config)[
        key.replace("extend_to", "max_position_embeddings")
    ]
    assert found == value or key == "rope_parameters" and value.items() <= found.items()


@pytest.mark.parametrize("key", OF_EXPERTS)
def test_router_losses_of_a_new_model_go_with_experts(key):
    with pytest.raises(ValueError, match=f"model.{key}=0.125: requires model.experts.count"):
        replace_keys(ModelConfig(), {key: 0.125})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_a_run_trains_with_the_router_losses_that_it_sets(
    kind, bases, tmp_path, capsys, one_device, monkeypatch
):
    def stop(*_):
        raise ValueError("no need to compile")

    options = {
        "device": "cpu",
        "model.name_or_path": bases / "qwen3_moe",
        "data.path": bases / "text.txt",
        "train.max_steps": 1,
        "train.seq_len": 16,
        "train.eval_batches": 1,
        "adapter.type": kind,
    }
    command = [f"--{key}={value}" for key, value in options.items()]
    told = "model.experts.aux_loss=0.5 sets the checkpoint's router_aux_loss_coef"
    with monkeypatch.context() as patch:
        patch.setattr("bptjax.training.compilation.compile_step", stop)
        assert main([*command, f"--run_dir={tmp_path / 'plain'}"]) == 2
    out, error = capsys.readouterr()
    assert (told in out) == (kind == "none") and "no need to compile" in error
    flags = ["--model.experts.aux_loss=0.5", "--model.experts.z_loss=0.125"]
    assert main([*command, *flags, f"--run_dir={tmp_path / 'run'}"]) == 0
    assert told not in capsys.readouterr().out
    losses = [r.get("train/auxiliary_loss") for r in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert max(filter(None, losses)) > 0.1
    # The run's directory and its export are models again.
    found = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "run"))).config
    assert (found.experts.aux_loss, found.experts.z_loss) == (0.5, 0.125)
    if kind == "lora":
        out = tmp_path / "adapter"
        assert convert.main(["export-adapter", str(tmp_path / "run"), str(out)]) == 0
        again = open_pretrained(ModelConfig(name_or_path=str(out))).config
        assert again.experts == found.experts
