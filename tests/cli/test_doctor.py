"""`bptjax doctor`: exit codes, wrong kernels, missing packages, and what it must not print."""

import json
import re
import socket
import subprocess
import sys

import pytest

from bptjax.cli import doctor
from bptjax.cli.main import main
from bptjax.ops.attention import KERNELS
from bptjax.ops.attention.contract import AttentionState
from bptjax.run import versions


@pytest.fixture
def only(monkeypatch):
    """Leaves a single probe."""
    return lambda name: monkeypatch.setattr(doctor, "PROBES", {name: doctor.PROBES[name]})


def test_a_machine_that_can_train(capsys, monkeypatch, tmp_path):
    """Every probe; neither secrets nor the names of user and host are printed."""
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/secret/library")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setenv("USER", "alice")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("bptjax.parallel.mesh.NVIDIA", str(tmp_path / "no GPU"))
    monkeypatch.setattr(socket, "gethostname", lambda: "alices-machine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "alice" / "hub"))
    monkeypatch.setattr("platform.platform", lambda: "Linux on alices-machine, /data/alice/x")
    assert main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    lines = dict(found["lines"])
    assert found["problems"] == []
    assert lines["attention: scan"].startswith("error ")
    assert lines["attention: cudnn"] == lines["attention: triton"] == "needs an NVIDIA GPU"
    assert "jax 0." in lines["packages"] and "cpu" in lines["devices"]
    assert lines["Hugging Face cache"].startswith("~/hub, 0.0 GiB")
    assert lines["cache of settings"].startswith("~/.cache/bptjax/execution, 0.0 GiB")
    assert lines["port for processes"] == "can be opened"
    assert lines["platform"].startswith("Linux on HOST, /data/USER/x")
    for secret in ("do_not_print", "/secret/", "alice"):
        assert secret not in out, secret


def test_a_wrong_kernel_is_a_problem(capsys, monkeypatch, only):
    only("attention")
    right = KERNELS["scan"].forward

    def doubled(x, spec):
        state = right(x, spec)
        return AttentionState(2 * state.out, state.lse)

    monkeypatch.setattr(KERNELS["scan"], "forward", doubled)
    monkeypatch.setattr(KERNELS["cudnn"], "unsupported", lambda x, spec: None)
    monkeypatch.setattr(KERNELS["cudnn"], "forward", lambda x, spec: 1 / 0)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"attention: scan +WRONG: error \d", out)
    assert re.search(r"attention: cudnn +FAILED: ZeroDivisionError", out)
    assert "problem: attention scan: WRONG" in out and "execution.attention_implementation" in out
    assert out.endswith("training would not run\n")


def test_a_gpu_without_jax_for_it_is_a_problem(capsys, monkeypatch, tmp_path, only):
    only("devices")
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("bptjax.parallel.mesh.NVIDIA", str(tmp_path / "nvidia0"))
    assert main(["doctor"]) == 1
    (problem,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("problem: ")]
    assert "JAX runs on the CPU" in problem and 'pip install -e ".[gpu]"' in problem


def test_an_old_driver_is_a_problem(capsys, monkeypatch, tmp_path, only):
    only("NVIDIA driver")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100, 550.54, 1 MiB, 81559 MiB'")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "installed", lambda package: "0.11.2")
    assert main(["doctor"]) == 1
    assert "NVIDIA driver 550: must be 580 or newer" in capsys.readouterr().out


def test_missing_packages_are_lines():
    """In a process without jax and transformers."""
    code = (
        "import sys; sys.modules['jax'] = sys.modules['transformers'] = None\n"
        "from bptjax.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(r"^devices +failed: ", done.stdout, re.M)
    assert re.search(r"^problem: devices: .*pip install -e", done.stdout, re.M)


def test_a_probe_that_training_does_not_need_may_fail(capsys, monkeypatch):
    def broken():
        raise OSError("no such\ndevice")
        yield

    monkeypatch.setattr(doctor, "PROBES", {"speed": (broken, False)})
    assert main(["doctor"]) == 0
    assert "failed: OSError: no such device\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("python", "jax", "device", "tested"),
    [
        ("3.11.7", "0.10.2", "cpu", True),
        ("3.12.1", "0.11.2", "h200", True),
        ("3.12.1", "0.11.2", "a100", False),
        ("3.12.1", "0.12.0", "cpu", True),
        ("3.12.1", "0.12.0", "h200", False),
        ("3.11.7", "0.10.20", "cpu", False),
    ],
)
def test_tested_versions(python, jax, device, tested, monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: python)
    monkeypatch.setattr(versions, "installed", lambda package: jax)
    assert versions.is_tested(device) == tested
