"""All commands: flags, help, one-line errors, exit codes, a start without jax."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiers import fast

from bptjax.cli import (
    chat,
    compare,
    configs,
    convert,
    doctor,
    evaluate,
    generate,
    plan,
    preview,
    profile,
    train,
)
from bptjax.cli import main as cli
from bptjax.cli.run_command import run_command
from bptjax.config import Config
from bptjax.parsing.flags import EXIT_CODES
from bptjax.parsing.keys import flatten
from bptjax.run.output import plural

COMMANDS = {
    "train": train.main,
    "preview": preview.main,
    "plan": plan.main,
    "profile": profile.main,
    "generate": generate.main,
    "chat": chat.main,
    "evaluate": evaluate.main,
    "convert": convert.main,
    "compare": compare.main,
    "configs": configs.main,
    "doctor": doctor.main,
}
# Flags that each command needs before it looks at the others.
NEEDED = {
    "generate": ["--model", "/nowhere", "--prompt", "x"],
    "chat": ["--model", "/nowhere"],
    "evaluate": ["--model", "/nowhere", "--data", "x"],
    "convert": ["merge-adapter", "/nowhere", "/nowhere/out"],
}


def error_of(main, argv, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err.removeprefix("starting: loading libraries\n")
    assert error.startswith("error: ") and error.count("\n") == 1
    return error.removeprefix("error: ").strip()


def test_every_command_is_listed_and_dispatched(capsys):
    assert list(cli.COMMANDS) == list(COMMANDS)
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, text in cli.COMMANDS.items():
        assert f"  {name:<10}{text}\n" in shown
        assert cli.main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: bptjax {name} ")
    assert "unknown command trian; nearest: train" == error_of(cli.main, ["trian"], capsys)
    assert "no command given: use one of train, " in error_of(cli.main, [], capsys)
    nearest = error_of(cli.main, ["convert", "merge-adaptor", "a", "b"], capsys)
    assert nearest == "unknown command merge-adaptor; nearest: merge-adapter"


def test_the_package_is_the_command():
    found = subprocess.run(
        [sys.executable, "-m", "bptjax", "convert", "--help"], capture_output=True, text=True
    )
    assert found.returncode == 0 and found.stdout.startswith("usage: bptjax convert ")


def test_plurals():
    assert plural(1, "batch", "es") == "1 batch"
    assert plural(0, "sequence") == "0 sequences" and plural(2000, "batch", "es") == "2,000 batches"


def test_the_version_is_that_of_the_package(capsys):
    import importlib.metadata

    import bptjax

    assert bptjax.__version__ == importlib.metadata.version("bptjax")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"bptjax {bptjax.__version__}\n"


LOST = "INTERNAL: Failed to launch kernel: \nCUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error"


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda argv: bytearray(2**60), "error: the host is out of memory; free some memory, or"),
        (lambda argv: np.zeros(2**55), "error: the host is out of memory (Unable to allocate "),
    ],
    ids=["python", "numpy"],
)
def test_a_host_without_memory_is_one_line(fail, message, capsys):
    assert run_command(fail, []) == 1
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1
    with pytest.raises(RuntimeError) as raised:
        run_command(fail, ["--debug"])
    assert isinstance(raised.value.__cause__, MemoryError)


def test_a_lost_device_is_one_line(capsys):
    def fail(argv):
        raise jax.errors.JaxRuntimeError(LOST + " x" * 500)

    assert run_command(fail, []) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: a GPU has failed (CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable")
    assert error.count("\n") == 1 and len(error) < 500 and "CUDA_VISIBLE_DEVICES" in error


def test_an_import_that_fails_in_bptjax_is_a_bug():
    def fail(argv):
        from bptjax.cli import no_such_name  # noqa: F401  # pyrefly: ignore

    with pytest.raises(ImportError, match="no_such_name"):
        run_command(fail, [])


def test_help_and_refusals_of_flags_import_no_jax():
    """Of the commands that read no config: those import the config's modules first."""
    code = (
        "import sys; from bptjax.cli.main import main; "
        "codes = [main(a.split()) for a in sys.argv[1:]]; "
        "assert codes == [0, 0, 0, 2, 2], codes; assert 'jax' not in sys.modules"
    )
    argv = ["--help", "--version", "generate --help", "evaluate --modle x", "convert merge-adapter"]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_for_users(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert COMMANDS[name](["--help"]) == 0
    help = capsys.readouterr().out
    joined = " ".join(help.split())
    assert max(map(len, help.splitlines())) <= 80
    assert EXIT_CODES in joined and "--debug show the traceback" in joined
    for noise in (
        "<class",
        "| null",
        "default: null",
        "Literal",
        "`",
        "(type:",
        "Optional",
        "None",
        "SUPPRESS",
    ):
        assert noise not in help, noise


def test_a_switch_is_no_key(capsys):
    assert train.main(["--profile", "--print_config"]) == 0
    assert "profile" not in capsys.readouterr().out
    assert train.main(["--help"]) == 0
    help = " ".join(capsys.readouterr().out.split())
    assert (
        "[--profile] [--supervise] [--debug]" in help and "--profile profile the third step" in help
    )


def test_help_of_train_explains_every_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert train.main(["--help"]) == 0
    help = capsys.readouterr().out
    for key, default in flatten(Config()).items():
        _, found, text = help.partition(f"  --{key} ")
        text = " ".join(text.partition("\n  --")[0].partition("\n\n")[0].split())
        assert found and len(text) > 20, key
        # The text names a default that depends on the work.
        value = str(default).lower()
        assert not isinstance(default, int) or value in re.split(r"[^\w-]+", text), key


@pytest.mark.parametrize(
    ("name", "flag", "wanted"),
    [
        ("train", "--train.max_step", "--train.max_steps"),
        ("generate", "--max_new_token", "--max_new_tokens"),
        ("generate", "--max-new-token", "--max_new_tokens"),
        ("evaluate", "--sample", "--samples"),
        ("convert", "--max_shard_sizes", "--max_shard_size"),
        ("compare", "--lenghts", "--lengths"),
    ],
)
def test_an_unknown_flag_names_the_nearest(name, flag, wanted, capsys):
    error = error_of(COMMANDS[name], [*NEEDED.get(name, []), flag, "1"], capsys)
    assert error == f"unknown flag --{flag[2:].replace('-', '_')}; nearest: {wanted}"


@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        ("train", ["--data.path=a", "--data.path", "b"], "data.path is given twice, as a and as b"),
        ("train", ["--data-path=b"], "unknown flag --data_path; nearest: --data.path"),
        ("train", ["--train.z-loss=1", "--train.z_loss=2"], "--train.z_loss is given twice"),
        ("train", ["--config=a.yaml", "--config", "b.yaml"], "--config is given twice"),
        ("compare", ["--sweep=true", "--sweep=false"], "--sweep is given twice"),
        ("generate", ["--seed=1", "--seed=2"], "--seed is given twice"),
        (
            "evaluate",
            ["--lengths", "8", "9", "--samples=1", "--lengths", "8"],
            "--lengths is given twice, as 8 9 and as 8",
        ),
        ("convert", ["--dtype=float32", "--dtype=float16"], "--dtype is given twice"),
        ("train", ["stray"], "unexpected argument stray"),
        ("train", ["--run_dir=~nosuch/x"], "run_dir=~nosuch/x: must not name an unknown user"),
        ("train", ["--run_dir=s3://x/run"], "run_dir=s3://x/run: must be a directory, not an"),
        ("train", ["--checkpoint.local_dir=gs://x"], "local_dir=gs://x: must be a directory"),
        ("train", ["--config=~nosuch/x.yaml"], "~nosuch/x.yaml"),
        ("train", ["--data.path=~nosuch/x"], "'~nosuch/x': no such file"),
        ("train", ["--model.hidden_size=8388608"], "must have at most 1e+13 parameters, not"),
        ("train", ["--model.num_layers=2049"], "num_layers=2049: must be at most 2,048"),
        ("train", ["--model.vocab_size=2147483647"], "must be at most 16,777,216"),
        ("train", ["--model.head_dim=2000000000"], "2000000000: must be at most 65,536"),
        ("train", ["--model.vocab_size=99999999999"], "99999999999: must be less than 2^31"),
        ("train", ["--model.attention.scale=.nan"], "scale=nan: must be a number below 3.4e38"),
        ("train", ["--optimizer.learning_rate=1e39"], "rate=1e+39: must be a number below 3.4e38"),
        ("train", ["--train.per_device_train_batch_size=9999999"], "must be less than 2^31 tokens"),
        ("generate", ["--model=~nosuch/x", "--prompt=x"], "~nosuch/x: must be a directory"),
        ("generate", ["--max_new_tokens", "x"], "--max_new_tokens=x: must be an integer"),
        ("generate", ["--dtype", "int8"], "--dtype=int8: must be one of float32, bfloat16"),
        ("generate", ["--prompt_file=/nowhere"], "--prompt_file=/nowhere: must be a file (No such"),
        ("generate", ["--seed"], "--seed: expected one argument"),
        ("compare", ["--repeats", "[1]"], "repeats=[1]: must be an integer"),
        ("compare", ["--chunks", "[a]"], "chunks=a: must be a list, each item an integer"),
        ("compare", ["--debug=1"], "--debug"),
        ("train", ["--profile=1"], "--profile"),
        ("preview", ["--profile"], "unknown flag --profile"),
    ],
)  # fmt: skip
def test_a_bad_flag_is_one_line(name, argv, message, capsys):
    needed = [] if argv[0].startswith("--model=") else NEEDED.get(name, [])
    assert message in error_of(COMMANDS[name], [*needed, *argv], capsys)


@pytest.mark.parametrize("during_import", [True, False])
def test_an_interrupt_ends_an_import_that_would_lose_it(tmp_path, during_import):
    lost = (
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    )
    (tmp_path / "extension.py").write_text(lost if during_import else "import os, signal\n")
    code = (
        "from bptjax.cli.run_command import end_imports_at_interrupts, run_command\n"
        "end_imports_at_interrupts()\n"
        "def command(argv):\n"
        "    import extension as x\n"
        "    x.os.kill(x.os.getpid(), x.signal.SIGINT)\n"
        "    print('goes on')\n"
        "raise SystemExit(run_command(command, []))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (130, b"", b"")


@pytest.mark.parametrize("name", COMMANDS)
def test_debug_shows_the_traceback(name):
    flag = "--nothing_like_this"
    argv = [*NEEDED.get(name, []), "--debug"]
    with pytest.raises(ValueError, match=flag):
        COMMANDS[name]([*argv, flag])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a"), 2),
        (NotImplementedError("a"), 2),
        (FileNotFoundError("a"), 2),
        (RuntimeError("a"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(0), 0),
    ],
)
def test_exit_codes(error, code, capsys):
    def command(argv):
        raise error

    assert run_command(command, []) == code
    assert capsys.readouterr().err == ("error: a\n" if code in (1, 2) else "")
    if code in (1, 2):
        with pytest.raises(type(error)):
            run_command(command, ["--debug"])


@pytest.mark.parametrize("kind", [OSError, ValueError, Exception])
def test_a_full_disk_is_a_failed_run(kind, capsys):
    """Of whatever kind: tokenizers raises Exception, tensorstore ValueError."""

    def command(argv):
        raise kind("No space left on device (os error 28)")

    assert run_command(command, []) == 1
    assert capsys.readouterr().err == "error: No space left on device (os error 28)\n"
    with pytest.raises(KeyError):  # Other errors are faults of the program.
        run_command(lambda argv: {}["a"], [])


@pytest.mark.parametrize("argv", fast([["--help"], ["train", "--help"]], [["--help"]]))
def test_a_closed_pipe_is_silent(argv):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "bptjax", *argv]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=buffered)
    os.close(write)
    # argparse ignores the error if the text is longer than the buffer.
    assert done.returncode in (0, 1) and done.stderr == b""
