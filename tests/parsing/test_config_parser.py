"""Configs from files, flags and trees of keys: which of them win, and what is refused."""

import re
import sys

import pytest
import yaml

from bptjax.cli import main as cli
from bptjax.cli import train
from bptjax.cli.run_command import run_command
from bptjax.config import Config, TrainConfig
from bptjax.config_parser import parse
from bptjax.models.config import ModelConfig
from bptjax.models.groups.norms import NormsConfig
from bptjax.parallel.mesh import ParallelConfig
from bptjax.parsing.tree_parser import parse_tree


def test_flags_may_repeat_with_one_value_or_as_lists():
    same = ["--train.max_steps=3", "--train.max-steps", "3", "--data.sample-by", "line"]
    config = parse([*same, "--adapter.type=lora", "--adapter.target_modules+=q_proj"])
    assert config.train.max_steps == 3 and config.data.sample_by == "line"
    prompts = ["--prompt", "a", "--prompt", "--- b -- c", "--prompt-file", "d", "--stop=--x"]
    args = cli.generate().parse_args(["--model", "m", *prompts])
    assert args.prompt == ["a", "--- b -- c"] and args.stop == ["--x"]
    both = cli.convert().parse_args(["--debug", "bptjax_to_hf", "a-b", "c", "--max-shard-size=1GB"])
    assert (
        both.conversion == "bptjax-to-hf" and both.source == "a-b" and both.max_shard_size == "1GB"
    )


def test_a_key_of_a_mapping_may_be_set_alone():
    config = parse(["--model.rope-parameters.rope_theta=5.0"])
    assert config.model.rope_parameters == {"rope_theta": 5.0}


def test_flags_win_over_the_file_wherever_it_stands(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train: {max_steps: 7, seq_len: 9}\n")
    for argv in (["--config", str(file), "--train.max_steps=5"],) * 2:
        for order in (argv, [argv[2], f"--config={file}"]):
            config = parse(order)
            assert (config.train.max_steps, config.train.seq_len) == (5, 9)


def test_a_key_that_a_file_has_twice_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train:\n  max_steps: 7\n  seq_len: 9\n  max_steps: 8\n")
    message = re.escape(f"{file}, line 4: train.max_steps is given twice; give it once")
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "must hold keys with values"),
        (b"- a\n- b\n", "must hold keys with values"),
        (b"run_dir: caf\xe9\n", "must be in UTF-8; byte 12 is not"),
        (b"train:\n\tmax_steps: 1\n", "must be YAML; while scanning .* line 2, column 1"),
        (None, r"must be a file \(No such file or directory\)"),
    ],
)
def test_a_bad_file_of_keys_is_named(tmp_path, content, message):
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--config={re.escape(str(file))}: {message}"):
        parse(["--config", str(file)])


def test_flags_win_over_defaults():
    config = parse(["--train.seq_len=5"], defaults=["--train.seq_len=4", "--train.max_steps=6"])
    assert (config.train.seq_len, config.train.max_steps) == (5, 6)


@pytest.mark.parametrize(
    "text",
    ["execution: auto  # chosen", "model: m.yaml\nexecution: &a 'auto'", "{execution: auto}"],
)
def test_execution_auto_sets_no_keys(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "m.yaml").write_text("hidden_size: 48")
    config = parse([f"--config={tmp_path / 'config.yaml'}"])
    assert config.execution == Config().execution
    assert config.model.hidden_size == (48 if "m.yaml" in text else Config().model.hidden_size)


def test_execution_auto_as_a_flag_overrides_the_file(tmp_path):
    (tmp_path / "config.yaml").write_text("execution: {remat: full, save: [query]}\nseed: 3")
    for flags in (["--execution=auto"], ["--execution", "auto"]):
        config = parse([f"--config={tmp_path / 'config.yaml'}", *flags, "--execution.remat=dots"])
        assert (config.seed, config.execution.remat, config.execution.save) == (3, "dots", None)


def test_a_printed_config_is_read_again(tmp_path, capsys):
    assert train.main(["--execution=auto", "--print_config"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert parse([f"--config={tmp_path / 'config.yaml'}"]) == Config()


@pytest.mark.parametrize("key", ["run_dir", "model.hidden_size", "optimizer.type", "parallel.sp"])
def test_null_where_a_key_has_no_such_value(tmp_path, key):
    group, _, name = key.partition(".")
    text = f"{group}:\n  {name}: null\n" if name else f"{group}: null\n"
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^{key}=(null|None): must be "):
        parse([f"--config={tmp_path / 'a.yaml'}"])


@pytest.mark.parametrize(
    "text",
    [
        "data: {sources: [{class_path: NAME.f}]}",
        "data: {sources: [NAME.f]}",
        "model: {class_path: NAME.f}",
        "model: NAME.f",
        "execution: NAME.f",
        "model: !!python/object/apply:NAME.f []",
    ],
)
@pytest.mark.parametrize("given", ["file", "flag", "tree"])
def test_no_class_named_by_a_config_is_imported(tmp_path, monkeypatch, capsys, text, given):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text("f = dict")
    text = text.replace("NAME", "stranger")
    group, _, value = text.partition(": ")
    (tmp_path / "a.yaml").write_text(text)
    argv = [f"--{group}={value}"] if given == "flag" else [f"--config={tmp_path / 'a.yaml'}"]
    if given == "tree":
        assert run_command(lambda _: parse_tree(yaml.load(text, yaml.BaseLoader), Config), []) == 2
    else:
        assert run_command(parse, argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error and "allowlist" not in error
    assert "stranger" not in sys.modules


def test_a_tree_of_keys_is_read_as_a_file_is():
    assert parse_tree({"execution": "auto", "train": {"seq_len": 5}}, Config).train.seq_len == 5
    for tree, message in (
        ({"train": {"seq_len": "x"}}, "train.seq_len=x: must be an integer"),
        ({"train": {"seq_le": 1}}, "unknown key train.seq_le; nearest: train.seq_len"),
        ({"train": 3}, "train=3: must be a group of keys"),
        ({"model": {"num_heads": None}}, "model.num_heads=null: must be an integer"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            parse_tree(tree, Config)


@pytest.mark.parametrize(
    "group, value, message",
    [
        ("train", TrainConfig(linear="fp8"), "train.linear=fp8: must be one of float8, null"),
        (
            "model",
            ModelConfig(norms=NormsConfig("rmsnorm")),
            "model.norms.type=rmsnorm: must be one of rms, layer",
        ),
        ("parallel", ParallelConfig(zero_stage=4), "parallel.zero_stage=4: must be one of 1, 2, 3"),
        ("device", "tpu", "device=tpu: must be one of auto, cpu, gpu"),
    ],
)
def test_a_config_made_in_python_has_known_values(group, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Config(**{group: value})
