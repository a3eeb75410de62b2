"""Keys and flags by the names of other programs lead to the right key, in a command that has it."""

import json
from itertools import product

import pytest
from tiers import fast
from weights.hf.cases import config
from weights.hf.loading import random_base

from bptjax.cli import main as cli
from bptjax.config import Config
from bptjax.config_parser import parse
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.parsing.keys import flatten
from bptjax.parsing.other_names import FLAGS, MAIN_KEYS, NO_COUNTERPART, OTHER_NAMES

KEYS = flatten(Config())
# Keys that need no table: the last part of the name has one group.
SAME = {
    "learning_rate": "optimizer.learning_rate",
    "lora.r": "adapter.r",
    "lora.alpha": "adapter.alpha",
    "per_device_train_batch_size": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "training.max_grad_norm": "optimizer.max_grad_norm",
    "warmup_ratio": "optimizer.warmup_ratio",
    "weight_decay": "optimizer.weight_decay",
    "save_steps": "checkpoint.save_steps",
    "target_modules": "adapter.target_modules",
    "packing": "data.packing",
    "report_to": "logging.report_to",
    "optimizer.max_steps": "train.max_steps",
}
# Names as they stand in those programs' groups.
GROUPED = {
    "train.batch_size": "train.per_device_train_batch_size",
    "lora.rank": "adapter.r",
    "peft.lora_alpha": "adapter.alpha",
    "model.base_model": "model.name_or_path",
    "norms.bias": "model.norms.bias",
    "optimizer.lr": "optimizer.learning_rate",
    "training_args.num_train_epochs": "train.epochs",
}


def test_every_target_is_a_key_with_a_value_of_its_type():
    for name, target in OTHER_NAMES.items():
        key, equals, value = target.partition("=")
        assert key in KEYS and name not in KEYS, name
        if equals:
            more = ["--adapter.type=qlora"] * (key != "adapter.type" and key.startswith("adapter."))
            more += ["--train.eval_steps=1"] * (key == "checkpoint.keep_best")
            parse([f"--{key}={value}", "--model.name_or_path=x", *more])
    assert {*FLAGS, *MAIN_KEYS.values()} <= KEYS.keys() | OTHER_NAMES.keys()
    assert not NO_COUNTERPART.keys() & (KEYS.keys() | OTHER_NAMES.keys())
    flags = {
        flag
        for name in ("generate", "evaluate")
        for flag in cli.PARSERS[name]()._option_string_actions
    }
    assert {f"--{flag}" for flag in FLAGS.values()} <= flags


@pytest.mark.parametrize(
    ("name", "own"),
    fast((OTHER_NAMES | SAME | GROUPED).items(), lambda name, own: "." in name or "=" in own),
)
def test_flags_and_keys_name_our_own(name, own, tmp_path):
    with pytest.raises(ValueError, match=f"^unknown flag --{name}; use --{own}$"):
        parse([f"--{name}=1"])
    *groups, last = name.split(".")
    tree = {last: 1}
    for group in reversed(groups):
        tree = {group: tree}
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=f"^unknown key {name}; use {own}$"):
        parse(["--config", str(tmp_path / "config.yaml")])


@pytest.mark.parametrize(("group", "key"), MAIN_KEYS.items())
def test_a_value_in_place_of_a_group_names_its_key(group, key, tmp_path):
    (tmp_path / "config.yaml").write_text(f"{group}: some")
    for argv in ([f"--{group}=some"], ["--config", str(tmp_path / "config.yaml")]):
        with pytest.raises(ValueError, match=f"some: must be a group of keys; use {key}$"):
            parse(argv)


@pytest.mark.parametrize(
    ("command", "name", "own"),
    [
        ("evaluate", "train.seq_len", "seq_len"),
        ("evaluate", "max_seq_length", "seq_len"),
        ("evaluate", "model.name_or_path", "model"),
        ("evaluate", "model_name_or_path", "model"),
        ("evaluate", "data.path", "data"),
        ("evaluate", "dataset", "data"),
        ("evaluate", "run_dir", "model"),
        ("evaluate", "resume_from_checkpoint", "model"),
        ("evaluate", "output_dir", "out"),
        ("generate", "run_dir", "model"),
        ("generate", "parallel.tp", "tp"),
        ("generate", "tokenizer_name", "tokenizer"),
        ("generate", "torch_dtype", "dtype"),
    ],
)
def test_commands_name_their_own_flags(command, name, own, capsys):
    assert cli.main([command, "--model=x", f"--{name}=1"]) == 2
    assert capsys.readouterr().err == f"error: unknown flag --{name}; use --{own}\n"


@pytest.mark.parametrize(
    ("name", "reason"), [*NO_COUNTERPART.items(), ("lora.bias", NO_COUNTERPART["bias"])]
)
def test_a_name_without_a_counterpart_says_why(name, reason, capsys):
    """--trust_remote_code was answered by "nearest: --optimizer.state_dtype"."""
    with pytest.raises(ValueError, match=f"^unknown flag --{name}; {reason}$"):
        parse([f"--{name}=1"])
    assert cli.main(["evaluate", "--model=x", f"--{name}=1"]) == 2
    assert capsys.readouterr().err == f"error: unknown flag --{name}; {reason}\n"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("do_predict", "see --help"),
        ("hub_strategy", "see --help"),
        ("ddp_timeout", "see --help"),
        ("seqlen", "nearest: --train.seq_len"),
        ("model.hiden_size", "nearest: --model.hidden_size"),
    ],
)
def test_a_guess_is_similar(name, answer):
    """--do_train was answered by --train.z_loss, --hub_token by --model.add_tokens."""
    with pytest.raises(ValueError, match=f"^unknown flag --{name}; {answer}$"):
        parse([f"--{name}=1"])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *product(["generate", "evaluate"], ["batch_size", "optim", "num_epochs", "lora_r"]),
        ("generate", "output_dir"),
    ],
)
def test_commands_guess_no_flag_for_a_key_that_they_lack(command, name, capsys):
    """--optim was answered by "nearest: --prompt"."""
    assert cli.main([command, "--model=x", f"--{name}=1"]) == 2
    assert capsys.readouterr().err == f"error: unknown flag --{name}; see --help\n"


@pytest.mark.thorough
def test_errors_of_evaluate_name_its_flags(tmp_path, capsys):
    raw = config("llama")
    raw.vocab_size = ByteTokenizer.vocab_size
    ByteTokenizer().save(random_base(tmp_path / "base", raw))
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "one two three four"}) + "\n")
    command = ["evaluate", f"--data={tmp_path / 'a.jsonl'}", "--perplexity=9", "--device=cpu"]
    command += [f"--out={tmp_path / 'out'}"]
    assert cli.main([*command, f"--model={tmp_path / 'base'}"]) == 2
    hint = "; set --text_key to the field with the text, or see --format and --fields\n"
    assert capsys.readouterr().err.endswith(hint)
    assert cli.main([*command, f"--model={tmp_path / 'base'}", "--text_key=body"]) == 0
    capsys.readouterr()
    command[-1] = f"--out={tmp_path / 'elsewhere'}"
    assert cli.main([*command, "--text_key=body", "--model=nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: --model=nowhere: must be a directory")
