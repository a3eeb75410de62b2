"""Setup of runs: bad input writes nothing, and defaults depend on the kind of run."""

import fcntl
import json
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from bptjax.cli.train import main
from bptjax.config import Config, to_yaml
from bptjax.config_parser import parse
from bptjax.data.check import DataCheck
from bptjax.models.config import ModelConfig
from bptjax.models.execution import ExecutionConfig
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.parsing.keys import flatten
from bptjax.training.checks import check_arrays_on_host
from bptjax.training.run_directory import acquire_run_dir
from bptjax.training.setup import _with_defaults
from bptjax.training.spec import TrainSpec
from bptjax.weights.pretrained import open_pretrained
from training.runs import rows

CONFIGS = Path(__file__).parents[2] / "configs"


BAD = {
    "unknown key": (
        ["--train.max_stepz", "3"],
        "flag --train.max_stepz; nearest: --train.max_steps",
    ),
    "wrong type": (["--train.max_steps", "many"], "train.max_steps=many: must be an integer"),
    "beyond 32 bits": (
        ["--optimizer.warmup_steps", "3000000000"],
        "optimizer.warmup_steps=3000000000: must be less than 2^31",
    ),
    "wrong choice": (
        ["--model.norms.type", "batch"],
        "model.norms.type=batch: must be one of rms, layer",
    ),
    "wrong choice of an optional key": (
        ["--optimizer.state_dtype", "int4"],
        "error: optimizer.state_dtype=int4: must be one of float32, bfloat16, int8 or null\n",
    ),
    "layers that do not make groups": (
        ["--execution.remat", "nested(2)"],
        "execution.remat=nested(2): k must divide the 1 layers",
    ),
    "hidden by the schedule": (
        ["--execution.schedule", "fused", "--execution.save", "[query, key]"],
        "execution.save=query: requires execution.schedule=split",
    ),
    "hidden by chunks": (
        ["--execution.save", "[query, gate]"],
        "execution.save=gate: requires an execution.ffn_chunk of at least train.seq_len=32",
    ),
    "not in the model": (
        ["--execution.save", "[gate]", "--execution.ffn_chunk", "32", "--model.gated", "false"],
        "execution.save=gate: must exist in the model's layers",
    ),
    "no such scaling": (
        ["--model.rope_parameters", "{rope_type: yarm, rope_theta: 1.0}"],
        "rope_type='yarm': must be one of",
    ),
    "no such factor": (
        ["--model.rope_parameters", "{rope_type: linear, factor: -4.0, rope_theta: 1.0e+4}"],
        "rope_parameters.factor=-4.0: must be finite and positive",
    ),
    "no average": (
        ["--optimizer.adam_beta1", "1.5"],
        "optimizer.adam_beta1=1.5: must be in [0, 1)",
    ),
    "no reader": (
        ["--optimizer.type=lion", "--optimizer.adam_beta1=0.8"],
        "optimizer.adam_beta1=0.8: must be 0.9 with optimizer.type=lion, which does not read it",
    ),
    "no share": (
        ["--optimizer.min_lr_ratio", "5"],
        "optimizer.min_lr_ratio=5.0: must be in [0, 1]",
    ),
    "no seed": (["--seed", "99999999999999999999"], "seed=99999999999999999999: must be in"),
    "two open axes": (
        ["--parallel.dp", "-1"],
        "must have at most one -1, the default of fsdp",
    ),
    "no port": (
        ["--parallel.coordinator=h:99999", "--parallel.num_processes=2", "--parallel.process_id=0"],
        "parallel.coordinator=h:99999: must be host:port",
    ),
    "no such checkpoint": (["--model.name_or_path", "./nowhere"], "./nowhere: must be a directory"),
    "missing config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "missing file": (["--data.path", "/nowhere.txt"], "/nowhere.txt"),
    "no heads": (["--model.num_heads", "3"], "num_heads=3"),
    "no gpu": (["--device", "gpu"], 'pip install -e ".[gpu]"'),
    "offload from a CPU": (
        ["--execution.offload", "0.5"],
        "execution.offload=0.5: must be 0 on a CPU",
    ),
    "no such attention": (["--execution.attention_implementation", "quick"], "'quick'"),
    "a kernel of another platform": (
        ["--execution.attention_implementation", "cudnn"],
        "attention 'cudnn': needs an NVIDIA GPU",
    ),
    "no cap": (
        ["--model.logits_softcap", "0"],
        "error: model.logits_softcap=0.0: must be positive and finite; leave it out for no cap\n",
    ),
    "no key heads": (["--model.num_kv_heads", "0"], "model.num_kv_heads=0: must be at least 1"),
    "negative z-loss": (["--train.z_loss", "-1"], "train.z_loss=-1.0: must be finite and not"),
    "no batches to evaluate on": (
        ["--train.eval_batches", "0"],
        "train.eval_batches=0: must be at least",
    ),
    "no such mesh": (
        ["--parallel.fsdp", "1", "--parallel.sp", "1", "--parallel.dp", "3"],
        "dp=3",
    ),
    "vocabulary": (["--model.vocab_size", "100"], "model.vocab_size=100"),
    "no memory": (
        [
            *("--model.position_embedding=learned", "--model.max_position_embeddings=2147483647"),
            "--model.hidden_size=1024",
        ],
        "GiB of this host, but parameters and optimizer state take",
    ),
    "positions": (
        ["--model.position_embedding", "learned", "--model.max_position_embeddings", "8"],
        "model.max_position_embeddings=8",
    ),
    "steps and epochs": (
        ["--train.epochs", "2"],
        "train.epochs=2.0: must not be set together with train.max_steps=20; set one of them",
    ),
    "no epochs": (["--train.epochs", "0"], "train.epochs=0.0: must be finite and positive"),
    "warm-up beyond the run": (
        ["--optimizer.warmup_steps", "21"],
        "optimizer.warmup_steps=21: the warm-up must end within the 20 steps of the run",
    ),
    "patience without evaluations": (
        ["--train.early_stopping_patience=2", "--train.eval_steps=null"],
        "train.early_stopping_patience=2: requires evaluations during the run; set train.eva",
    ),
    "the best of nothing": (
        ["--checkpoint.keep_best=true", "--data.eval_fraction=0"],
        "checkpoint.keep_best=true: requires held-out data; set data.eval_fraction or data",
    ),
    "no such task": (
        ["--train.eval_tasks=[magic]"],
        "train.eval_tasks=magic: must be all or one of p",
    ),
    "a length too short for a task": (
        ["--train.eval_tasks=[passkey]"],
        "train.seq_len=32: must be at least ",
    ),
    "lengths without tasks": (
        ["--train.eval_task_lengths=[9]"],
        "train.eval_task_lengths: requires train.eval_tasks; leave it out",
    ),
    "the best of an unknown metric": (
        ["--checkpoint.best_metric=eval/tasks"],
        "checkpoint.best_metric=eval/tasks: must be one of eval/loss\n",
    ),
    "no such tracker": (
        ["--logging.report_to=[comet]"],
        "logging.report_to=comet: must be a list, each item one of tensorboard, wandb",
    ),
    "not writable": (["--run_dir", "/proc/run"], "run_dir=/proc/run: must be writable"),
}


@pytest.mark.parametrize(("extra", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_exit_2_and_no_trace(
    arguments, tmp_path, monkeypatch, capsys, extra, message
):
    monkeypatch.undo()
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        from bptjax.parallel import mesh

        choose = mesh.select_devices
        patch.setattr(
            "bptjax.training.setup.select_devices",
            lambda device: choose(device)[:1],
        )
        where = [] if "--run_dir" in extra else ["--run_dir", str(run_dir)]
        assert main([*([] if "--config" in extra else arguments), *where, *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not run_dir.exists()


def test_a_number_does_not_stand_for_a_group(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("train: 3\n")
    assert main(["--config", str(tmp_path / "config.yaml")]) == 2
    assert capsys.readouterr().err == "error: train=3: must be a group of keys\n"
    assert main(["--train.on_spike=3"]) == 2
    assert capsys.readouterr().err == "error: train.on_spike=3: must be a group of keys\n"
    assert main(["--execution=fast"]) == 2
    wanted = "error: execution=fast: must be auto or a group of keys\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_is_read(file):
    assert parse(["--config", str(file)], "").run_dir == f"runs/{file.stem}"


@pytest.mark.thorough
def test_epochs(arguments, tmp_path, capsys, monkeypatch):
    """Every record is counted, however long that takes."""
    check = DataCheck.run
    monkeypatch.setattr(DataCheck, "run", lambda self, seconds=0.0: check(self, seconds))
    lines = "".join(json.dumps({"input_ids": [7] * n}) + "\n" for n in (11, 21, 33, 34) * 3)
    (tmp_path / "ids.jsonl").write_text(lines)
    command = [*arguments, f"--data.path={tmp_path / 'ids.jsonl'}", "--data.packing=none"]
    command += ["--data.eval_fraction=0", "--train.max_steps=null", "--train.sample_tokens=0"]
    command.append(f"--run_dir={tmp_path / 'run'}")
    assert main([*command, "--train.epochs=0.5"]) == 0
    line = "train.epochs=0.5: 4 steps of 2 sequences, 142 tokens; "
    line += "an epoch is 15 sequences, 285 tokens"
    assert line in capsys.readouterr().out
    assert sorted(rows(tmp_path / "run")) == [1, 2, 3, 4]
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "epochs: 0.5" in saved and "max_steps: null" in saved
    assert main([*command, "--train.epochs=0.4"]) == 2
    assert "train.epochs=0.4: must not end the run in" in capsys.readouterr().err
    assert main([*command, "--train.epochs=0.6"]) == 0
    assert "5 steps in place of 4: the learning rate of step 5" in capsys.readouterr().out
    assert sorted(rows(tmp_path / "run")) == [1, 2, 3, 4, 5]


def test_an_empty_data_set_is_refused(arguments, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    command = [*arguments, "--data.path", str(tmp_path / "empty.jsonl")]
    assert main([*command, "--run_dir", str(tmp_path / "run")]) == 2
    assert "must hold documents, not only 1 empty file" in capsys.readouterr().err


def test_ctrl_c_before_the_first_step(arguments, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bptjax.training.data.open_split", interrupted)
    assert main([*arguments, "--run_dir", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == "interrupted before training; no step is lost\n"


def test_a_refused_start_leaves_the_config_as_it_was(arguments, uninterrupted, capsys):
    """The start is refused for another batch size, or because another process is running."""
    before = (uninterrupted / "config.yaml").read_bytes()
    command = [*arguments, "--run_dir", str(uninterrupted)]
    assert main([*command, "--train.gradient_accumulation_steps", "3"]) == 2
    assert "global batch size: the checkpoint in" in capsys.readouterr().err
    handle = os.open(uninterrupted, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert main([*command, "--execution.ffn_chunk", "7"]) == 2
    os.close(handle)
    assert "must not be in use by another process" in capsys.readouterr().err
    assert (uninterrupted / "config.yaml").read_bytes() == before


PRE_TRAINING = {
    "optimizer.learning_rate": 3e-4,
    "optimizer.warmup_steps": 0,
    "optimizer.warmup_ratio": None,
    "optimizer.weight_decay": 0.1,
    "train.compute_dtype": "float32",
}


FINE_TUNING = PRE_TRAINING | {
    "optimizer.learning_rate": 2e-5,
    "optimizer.warmup_steps": None,
    "optimizer.warmup_ratio": 0.03,
    "optimizer.weight_decay": 0.0,
}


CHECKPOINT = "--model.name_or_path=somewhere"


@pytest.mark.parametrize(
    ("flags", "platform", "wanted"),
    [
        ([], "cpu", PRE_TRAINING),
        ([], "gpu", PRE_TRAINING),
        ([CHECKPOINT], "cpu", FINE_TUNING),
        ([CHECKPOINT], "gpu", FINE_TUNING | {"train.compute_dtype": "bfloat16"}),
        (
            [CHECKPOINT, "--adapter.type=lora"],
            "cpu",
            FINE_TUNING | {"optimizer.learning_rate": 2e-4},
        ),
        (
            ["--optimizer.type=lion"],
            "cpu",
            PRE_TRAINING | {"optimizer.learning_rate": 7.5e-5, "optimizer.weight_decay": 0.4},
        ),
        (
            [CHECKPOINT, "--adapter.type=qlora", "--optimizer.warmup_steps=7"],
            "cpu",
            FINE_TUNING
            | {"optimizer.learning_rate": 2e-4}
            | {"optimizer.warmup_steps": 7, "optimizer.warmup_ratio": None},
        ),
        (
            ["--optimizer.warmup_ratio=0.1", "--train.compute_dtype=float16"],
            "gpu",
            PRE_TRAINING
            | {"optimizer.warmup_steps": None, "optimizer.warmup_ratio": 0.1}
            | {"train.compute_dtype": "float16"},
        ),
    ],
)
def test_defaults_follow_the_work(flags, platform, wanted, tmp_path):
    config = parse(flags).on(platform)
    assert {key: flatten(config)[key] for key in wanted} == wanted
    # What a run writes, read again, is the same on any platform.
    config = replace(config, execution=ExecutionConfig(**asdict(config.execution.complete())))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = parse(["--config", str(tmp_path / "config.yaml")])
    assert again == config == again.on("cpu") == again.on("gpu")


@pytest.mark.thorough
def test_a_fine_tuning_run_logs_its_defaults_and_keeps_them(
    arguments, uninterrupted, tmp_path, capsys
):
    text = Path(arguments[1]).read_text().replace("model: {", "model: {}\n_: {")
    lines = [line for line in text.splitlines() if not line.startswith(("_", "optimizer"))]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    command = [f"--config={tmp_path / 'config.yaml'}", f"--model.name_or_path={uninterrupted}"]
    command += [f"--run_dir={tmp_path / 'run'}", "--train.max_steps=2"]
    command += ["--train.eval_steps=null", "--train.sample_tokens=0"]
    assert main(command) == 0
    line = (
        "optimizer.learning_rate=2e-05, optimizer.weight_decay=0.0, optimizer.warmup_ratio=0.03, "
    )
    out = capsys.readouterr().out
    assert f"fine-tuning defaults: {line}train.compute_dtype=float32" in " ".join(out.split())
    assert max(len(text) for text in out.splitlines() if "optimizer." in text) <= 80
    saved = (tmp_path / "run" / "config.yaml").read_text()
    for text in ("learning_rate: 2.0e-05", "warmup_ratio: 0.03", "dtype: float32"):
        assert text in saved
    assert rows(tmp_path / "run", "train/learning_rate")[1] == pytest.approx(2e-5)
    # The checkpoint determines the architecture, in place of the defaults of a new model.
    assert f"model:\n  name_or_path: {uninterrupted}\nobjective:" in saved
    assert open_pretrained(ModelConfig(name_or_path=str(tmp_path / "run"))).config.hidden_size == 16
    # Older versions wrote the defaults. The run goes on, and its model is found.
    old = yaml.safe_load(saved)
    defaults = asdict(ModelConfig(name_or_path=str(uninterrupted)))
    old["model"] = defaults | {"rope_parameters": {"rope_theta": 10_000.0}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(old))
    assert open_pretrained(ModelConfig(name_or_path=str(tmp_path / "run"))).config.hidden_size == 16
    saved = parse(["--config", str(tmp_path / "run" / "config.yaml")]).on("cpu")
    acquire_run_dir(tmp_path / "run", saved)
    assert main([flag.replace("steps=2", "steps=3") for flag in command]) == 0
    assert sorted(rows(tmp_path / "run")) == [1, 2, 3]
    assert "hidden_size" not in (tmp_path / "run" / "config.yaml").read_text()
    # On a GPU the dtype would be another; the run keeps its own.
    config = parse(command)
    assert _with_defaults(config, "gpu").train.compute_dtype == "float32"
    other = replace(config, run_dir=str(tmp_path / "other"))
    assert _with_defaults(other, "gpu").train.compute_dtype == "bfloat16"


def test_saved_config_is_the_resolved_one(uninterrupted, arguments):
    saved = parse(["--config", str(uninterrupted / "config.yaml")], "")
    assert saved == parse([*arguments, "--run_dir", str(uninterrupted)], "").on("cpu")
    assert json.dumps(saved.train.max_steps) == "20"


@pytest.mark.parametrize(
    "groups, text",
    [
        (dict(execution=ExecutionConfig(offload=0.5)), "execution.offload=0.5: must be 0.0"),
        (dict(optimizer=OptimizerConfig(state_memory_kind="pinned_host")), "must be device"),
        (dict(optimizer=OptimizerConfig(in_backward=True)), "must be False"),
    ],
)
@pytest.mark.parametrize("version, misreads", [("0.10.2", True), ("0.11.1", False)])
def test_host_memory_that_a_gpu_misreads(groups, text, version, misreads, monkeypatch):
    monkeypatch.setattr("bptjax.ops.target.version", lambda package: version)
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    spec = TrainSpec(Config(**groups), ModelConfig(), mesh)
    with pytest.raises(ValueError, match=text) if misreads else nullcontext():
        check_arrays_on_host(spec)
    check_arrays_on_host(replace(spec, config=Config()))
