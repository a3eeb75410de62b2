"""Runs of encoders: masked language models learn, resume exactly and are exported."""

import json
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from bptjax.cli.convert import main as convert
from bptjax.cli.train import main
from training.runs import ENCODER, rows, stop_at
from training.test_setup import CONFIGS


@pytest.fixture(scope="module")
def encoder(arguments, tmp_path_factory):
    """Command line of the tiny run with an encoder, without its run directory."""
    config = yaml.safe_load(Path(arguments[1]).read_text()) | yaml.safe_load(ENCODER)
    del config["train"]["sample_tokens"]
    file = tmp_path_factory.mktemp("encoder") / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return ["--config", str(file)]


@pytest.fixture(scope="module")
def finished(encoder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
        assert main([*encoder, f"--run_dir={run_dir}"]) == 0
    return run_dir


@pytest.mark.thorough
def test_a_masked_language_model_learns(finished):
    losses = rows(finished)
    assert losses[20] < losses[1] - 0.5
    assert sorted(rows(finished, "eval/loss")) == [0, 8, 16, 20]
    counts, seen = rows(finished, "train/loss_tokens"), rows(finished, "train/tokens_seen")
    assert 0.1 < sum(counts.values()) / seen[20] < 0.2
    log = (finished / "log.txt").read_text()
    assert re.search(r"tokens, 15.0% of the tokens that are not special in the loss", log)
    assert "held-out nats per token: " in log and "bits per byte" not in log
    example, *_ = json.loads((finished / "run.json").read_text())["examples"]
    assert 0 < example["in_loss"] < 0.5 * example["tokens"]


@pytest.mark.thorough
def test_stop_and_resume_is_exact(encoder, finished, tmp_path, monkeypatch):
    command = [*encoder, f"--run_dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        stop_at(9, signal.SIGTERM, patch)
        assert main(command) == 143
    assert main(command) == 0
    for name in ("train/loss", "train/loss_tokens", "eval/loss"):
        assert rows(tmp_path / "run", name) == rows(finished, name)


@pytest.mark.thorough
def test_export_and_fine_tuning_of_the_export(encoder, finished, tmp_path):
    """transformers computes the same with the export, and a run that starts from it starts with its
    loss."""
    pytest.importorskip("torch")
    hf = tmp_path / "hf"
    assert convert(["bptjax-to-hf", str(finished), str(hf), "--verify"]) == 0
    assert json.loads((hf / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    tuning = yaml.safe_load(Path(encoder[1]).read_text()) | dict(model=dict(name_or_path=str(hf)))
    tuning["train"] |= dict(max_steps=2, eval_steps=None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tuning))
    assert main([f"--config={tmp_path / 'config.yaml'}", f"--run_dir={tmp_path / 'run'}"]) == 0
    first, last = (rows(d, "eval/loss") for d in (tmp_path / "run", finished))
    np.testing.assert_allclose(first[0], last[20], rtol=1e-6)
    assert convert(["bptjax-to-hf", str(tmp_path / "run"), str(tmp_path / "again")]) == 0


BAD = {
    "no head": (
        ["--model.encoder.masked_head=false"],
        "model.causal=false: requires masked_head or",
    ),
    "sample": (["--train.sample_tokens=8"], "train.sample_tokens=8: must be 0 for an encoder"),
    "adapter": (["--adapter.type=lora"], "adapter.type=lora: must be none for an encoder"),
    "characters": (["--data.tokenizer=char"], "data.tokenizer: must have a mask token"),
    "types": (
        ["--model.causal=true"],
        "model.encoder.token_types=2: requires model.causal=false",
    ),
    "probability": (["--data.mlm_probability=0"], "data.mlm_probability=0.0: must be in (0, 1]"),
    "first norm": (
        ["--model.norms.first=false"],
        "model.norms.first=false: requires norms.pos",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_keys(encoder, tmp_path, capsys, name):
    flags, message = BAD[name]
    assert main([*encoder, f"--run_dir={tmp_path / 'run'}", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_records_and_keys_of_decoders(arguments, encoder, tmp_path, capsys):
    chat = json.dumps({"prompt": "a", "answer": "b"}) + "\n"
    (tmp_path / "chats.jsonl").write_text(chat * 20)
    command = [*encoder, f"--run_dir={tmp_path / 'run'}", f"--data.path={tmp_path / 'chats.jsonl'}"]
    assert main(command) == 2
    assert "must have text or token ids, not a chat, to train an encoder" in capsys.readouterr().err
    assert main([*arguments, f"--run_dir={tmp_path / 'run'}", "--data.mlm_probability=0.3"]) == 2
    assert (
        "data.mlm_probability=0.3: requires objective.type=masked_tokens" in capsys.readouterr().err
    )


@pytest.mark.thorough
def test_the_config_in_the_repository(tmp_path, capsys):
    """A step of it."""
    command = [f"--config={CONFIGS / 'bert_mlm.yaml'}", f"--run_dir={tmp_path / 'run'}"]
    command += [f"--data.path={CONFIGS.parent / 'README.md'}", "--train.max_steps=1"]
    command += ["--train.eval_batches=1", "--device=cpu", "--optimizer.warmup_steps=0"]
    assert main(command) == 0
    assert "cannot be exported" not in capsys.readouterr().out
