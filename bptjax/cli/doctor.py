"""`bptjax doctor`: shows whether training would run on this machine, and facts for a bug report.

The output holds no user name, no host name, and no environment variables other than `SHOWN`. Probes
import jax and other packages themselves, so that a missing package is one line of output.
"""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bptjax.cli.main import launch
from bptjax.cli.run_command import INSTALL
from bptjax.run.versions import PACKAGES, TESTED, installed, is_tested, versions

# Environment variables that are shown. None of them holds a secret.
SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# The oldest driver for CUDA 13.
DRIVER = 580
# Seconds to spend on adding up the size of a cache.
SIZE_SECONDS = 3.0


class Problem(Exception):
    """A reason why training would not run on this machine, with its remedy."""


Lines = Iterator[tuple[str, str] | Problem]


main = partial(launch, "doctor")


def run(args: Namespace) -> int:
    """Prints the lines of each probe. Returns 0 if training would run, else 1."""
    lines: list[tuple[str, str]] = []
    problems: list[str] = []

    def show(name: str, text: str) -> None:
        lines.append((name, private(text)))
        if not args.json:
            print(f"{name:<22}{lines[-1][1]}", flush=True)

    for name, (probe, needed) in PROBES.items():
        try:
            for found in probe():
                if isinstance(found, Problem):
                    problems.append(private(str(found)))
                else:
                    show(*found)
        except Exception as error:
            text = _describe(error)
            show(name, f"failed: {text}")
            if needed:
                remedy = f"; {INSTALL}" if isinstance(error, ImportError) else ""
                problems.append(private(f"{name}: {text}{remedy}"))
    if args.json:
        print(json.dumps({"lines": lines, "problems": problems}, indent=1))
        return 1 if problems else 0
    for problem in problems:
        print(f"problem: {problem}")
    print("training would not run" if problems else "training would run on this machine")
    return 1 if problems else 0


def private(text: str) -> str:
    """Replaces the home directory and the names of user and host, and joins the lines."""
    text, home, host = " ".join(text.split()), os.path.expanduser("~"), socket.gethostname()
    if home not in ("/", "~"):  # `~` if there is no home directory.
        text = text.replace(home, "~")
    for user in filter(None, (os.environ.get("USER", ""), Path(home).name)):
        text = re.sub(rf"(?<=/){re.escape(user)}(?![\w-])", "USER", text)
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if host else text


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _platform() -> Lines:
    yield "platform", f"{platform.platform()}, {os.cpu_count()} CPU cores"
    memory = dict(re.findall(r"(MemTotal|MemAvailable): +(\d+)", Path("/proc/meminfo").read_text()))
    total, free = (int(memory[key]) * 1024 for key in ("MemTotal", "MemAvailable"))
    yield "host memory", f"{_size(total)}, {_size(free)} of it available"
    disk = shutil.disk_usage(".")
    yield "current directory", f"{_size(disk.free)} of {_size(disk.total)} free"
    for name in SHOWN:
        if name in os.environ:
            yield "environment", f"{name}={os.environ[name]}"


def _driver() -> Lines:
    query = "--query-gpu=name,driver_version,memory.used,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    if shutil.which("nvidia-smi") is None:
        yield "NVIDIA driver", "nvidia-smi is not installed"
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    for line in (done.stdout or done.stderr).splitlines()[:8]:
        yield "NVIDIA driver", line
    version = re.search(r", (\d+)\.", done.stdout)
    if version and int(version[1]) < DRIVER and installed("jax-cuda13-plugin"):
        yield Problem(
            f"NVIDIA driver {version[1]}: must be {DRIVER} or newer for CUDA 13; update the driver"
        )


def _versions() -> Lines:
    installed = versions()
    yield "Python", installed.pop("Python") or ""
    yield "packages", ", ".join(f"{name} {text}" for name, text in installed.items() if text)
    yield "not installed", ", ".join(name for name in PACKAGES if not installed[name]) or "none"


def _imports() -> Lines:
    for name in ("bptjax.cli.train", "bptjax.training.loop"):
        import_module(name)
    yield "training", "its modules load"


def _devices() -> Lines:
    # Preallocate nothing: other programs may need the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from bptjax.cost.devices import kind_of
    from bptjax.parallel.mesh import select_devices

    try:
        devices = select_devices("auto")
    except ValueError as error:
        yield Problem(str(error))
        devices = jax.devices()
    first, kind = devices[0], kind_of(devices[0].device_kind)
    text = f"{len(devices)} × {first.device_kind}"
    if first.platform != "cpu":
        text += f", {kind}" if kind else ", an unknown kind: metrics have no MFU"
        text += f", {first.client.platform_version}"
    if memory := (first.memory_stats() or {}).get("bytes_limit"):
        text += f", {_size(memory)} each for jax"
    yield "devices", text
    sets = "; ".join(map(str, TESTED))
    tested = is_tested(first.platform if first.platform == "cpu" else kind or "")
    yield "versions are tested", "yes" if tested else f"no; tested: {sets}"


def _kernels() -> Lines:
    import jax

    from bptjax.cli.device_check import TOLERANCE, check_kernels

    device = jax.devices()[0]
    most = TOLERANCE["bfloat16" if device.platform == "gpu" else "float32"]
    for name, refusal, check in check_kernels(device):
        wrong, text = "", refusal
        if refusal is None:
            try:
                error = check()
                wrong, text = "WRONG: " * (error > most), f"error {error:.1e}, at most {most:g}"
            except Exception as failure:  # Go on to the other kernels.
                wrong, text = "FAILED: ", _describe(failure)
        yield f"attention: {name}", f"{wrong}{text}"
        if wrong:
            yield Problem(
                f"attention {name}: {wrong}{text}; report this output, and set "
                "execution.attention_implementation to another kernel"
            )


def _speed() -> Lines:
    import jax

    from bptjax.cli.device_check import measure

    device = jax.devices()[0]
    if device.platform == "gpu":
        yield from measure(device)


def _caches() -> Lines:
    import jax
    from huggingface_hub.constants import HF_HUB_CACHE

    from bptjax.parallel.mesh import cache_directory

    for name, where in (
        ("compilation cache", jax.config.values["jax_compilation_cache_dir"]),
        ("cache of settings", cache_directory() / "execution"),
        ("Hugging Face cache", HF_HUB_CACHE),
    ):
        yield name, f"{where}, {_total(Path(where))}" if where else "none"


def _processes() -> Lines:
    from bptjax.parallel.launch import find_process
    from bptjax.parallel.mesh import ParallelConfig

    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5):
            yield "port for processes", "can be opened"
    process = find_process(ParallelConfig(), os.environ)
    text = f"process {process.index} of {process.count}" if process else "one process"
    yield "launcher", text


# Probes by name, in the order of the output, and whether training needs what they check.
PROBES: dict[str, tuple[Any, bool]] = {
    "platform": (_platform, False),
    "NVIDIA driver": (_driver, False),
    "versions": (_versions, True),
    "training": (_imports, True),
    "devices": (_devices, True),
    "attention": (_kernels, True),
    "speed": (_speed, False),
    "caches": (_caches, False),
    "processes": (_processes, False),
}


def _size(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _total(directory: Path) -> str:
    """Formats the size of a directory, or a lower bound if it has many files."""
    size, end = 0, time.monotonic() + SIZE_SECONDS
    for path in directory.rglob("*"):
        size += path.lstat().st_size
        if time.monotonic() > end:
            return f"more than {_size(size)}"
    return _size(size)
