"""Sets up eight virtual CPU devices, errors for silent promotion of ranks and dtypes, and fast
compilation, once per session."""

import gc
import os
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]  # A program has one module for LLVM.
if version("jaxlib").startswith("0.10."):
    # The older emitters compile in a third of the time. Later versions have neither them nor the
    # flag, and take an unknown flag for an error.
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_opt_preset=FAST_COMPILE"]
    FLAGS += ["--xla_llvm_force_inline_before_split=false"]
if find_spec("fa4_jax"):
    FLAGS.append("--xla_gpu_enable_dynamic_slice_fusion=false")  # `fa4.XLA_FLAG`
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
# Stack traces in compiled programs, which no test reads, are a tenth of the tests' time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Matrices of tests are so small that torch's threads spend their time waiting for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# JAX looks for plug-ins once. CUDA's, which the extra `plan` brings, refuses a machine without
# CUDA's libraries; after a test that asked for devices, none could compile for absent GPUs.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # In the environment, for the processes that tests start: what one has compiled, the others
    # load.
    CACHE = tempfile.TemporaryDirectory(prefix="bptjax-test-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
    # With a largest size JAX locks the cache, so that no process reads half an entry.
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**34)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
    os.environ["XDG_CACHE_HOME"] = f"{CACHE.name}/home"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402
from ops.shapes import check  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Before the first import: shapes and dtypes in these packages are checked at every call.
hook = install_import_hook(
    ["bptjax.ops", "bptjax.parallel", "bptjax.models"],
    f"{check.__module__}.{check.__name__}",
).hook
# The hook's decorator adds nothing to `check`.
decorator: Any = lambda typechecker: typechecker  # noqa: E731
jaxtyping.jaxtyped = decorator
checked = hook.should_instrument
# But for what Triton compiles from its source, and for configs, which hold no arrays: estimates of
# a step read their properties a million times.
UNCHECKED = "triton_kernels", "models.config", "models.execution"
hook.should_instrument = lambda name: (
    checked(name) and not (name.endswith(UNCHECKED) or ".models.groups." in name)
)


def pytest_xdist_auto_num_workers():
    """One process more than there are cores, because tests wait for processes and disks; each takes
    up to 3 GB of memory."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores + 1, memory // 3_000_000_000))


@pytest.fixture
def one_device(monkeypatch):
    """Trains on one device: programs for eight take twice as long to compile."""
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])


@pytest.fixture(autouse=True, scope="session")
def steps_are_compiled_once():
    """Runs in one process that differ in their files alone share a compiled step: tracing it again
    is a fifth of the time of a tiny run."""
    from bptjax.ops.choices import record, record_choices
    from bptjax.training import compilation

    compiled = {}

    def compile_once(spec, state, batch):
        files = "run_dir", "data", "checkpoint", "logging"
        config = {k: v for k, v in vars(spec.config).items() if k not in files}
        arrays = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves((state, batch))]
        structure = jax.tree.structure((state, batch))
        key = spec.model, spec.mesh, spec.epoch_steps, arrays, structure
        key = repr((config, *key))
        if key not in compiled:
            with record_choices() as choices:
                compiled[key] = compile_step(spec, state, batch), choices
        step, choices = compiled[key]
        for choice in choices:
            record(choice.operation, choice.name, dict(choice.refusals))
        return step

    compile_step = compilation.compile_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "compile_step", compile_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def programs():
    """Keeps the last programs, by their keys in JAX's cache, so that equal ones are compiled once.
    Writing all programs to files takes longer than it saves."""
    from jax._src import compilation_cache

    programs = {}

    def get(key, *_):
        if key not in programs:
            return None, None
        programs[key] = programs.pop(key)
        return programs[key], 0

    def put(key, name, program, *_):
        programs[key] = program
        if len(programs) > 64:  # Of up to 10 MB each.
            del programs[next(iter(programs))]

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation_cache, "get_executable_and_time", get)
        patch.setattr(compilation_cache, "put_executable_and_time", put)
        yield programs


@pytest.fixture(autouse=True, scope="module")
def few_programs(programs):
    """Forgets all programs when there are many: each has several of the 65,530 memory maps that
    Linux gives a process, and compiling another one without a map ends the process."""
    yield
    if sys.platform == "linux":
        with open("/proc/self/maps") as maps:
            many = sum(1 for _ in maps) > 16_000
        if many:
            programs.clear()
            jax.clear_caches()


# Few tests that take long, many of them waiting. Other files come by their number of tests.
LONG = "test_hosts.py", "test_extension.py", "test_gemma4.py", "test_images.py"
# Another file whose tests mostly wait. It comes later, beside tests that compute.
LATER = "test_members.py"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Starts with the long files: at the end, the processes without one would be idle."""
    tests = Counter(item.path for item in items)
    middle = sorted(tests.values())[len(tests) // 2] if tests else 0

    def place(item):
        name, number = item.path.name, tests[item.path]
        return name not in LONG, -(middle if name == LATER else number), item.path

    items.sort(key=place)


def pytest_collection_finish():
    """Leaves modules and tests out of garbage collections, which tracing starts by the thousand."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
