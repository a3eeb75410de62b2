"""Without a package that bptjax may lack, another implementation runs and the log says so, or one
line names the package."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiers import fast

from bptjax.cli.main import main
from bptjax.cli.run_command import run_command
from bptjax.data.hf_tokenizer import HFTokenizer
from bptjax.ops import attention, triton_call
from bptjax.ops.attention import cudnn, fa4, triton_flash
from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.choices import record_choices
from bptjax.ops.mask import Mask
from bptjax.run.metrics import JsonlWriter
from bptjax.run.trackers import Trackers
from bptjax.weights.hf.tensors import Tensors

ROOT = Path(__file__).parents[1]


def hide(module, monkeypatch):
    for name in {module, *(name for name in sys.modules if name.startswith(f"{module}."))}:
        monkeypatch.setitem(sys.modules, name, None)


def command(*argv):
    return lambda folder, monkeypatch: main([word.format(folder) for word in argv])


def process(module, *argv):
    """The command in a new process, because jax, which this one has imported, imports the module
    once."""

    def run(folder, monkeypatch):
        code = f"import sys; sys.modules[{module!r}] = None; from bptjax.cli.main import main; "
        start = [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))"]
        done = subprocess.run([*start, *argv], capture_output=True, text=True)
        print(done.stderr, file=sys.stderr, end="")
        return done.returncode

    return run


def tracker(name):
    def run(folder, monkeypatch):
        Trackers(JsonlWriter(folder), [name], folder, {}, None, print).close()
        return 0

    return run


def kernel(missing, impl):
    """The choice of a kernel on a Hopper GPU."""

    def version(name):
        if name == missing:
            raise PackageNotFoundError(name)
        return "0.3.1"

    def choose(argv):
        x = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
        # cuDNN, which needs no package, has no soft cap.
        spec = AttentionSpec(mask=Mask(causal=True), scale=1.0, softcap=30.0)
        with record_choices() as choices:
            attention.choose(impl, QKV(x, x, x), spec)
        print(*choices[0].lines(), sep="\n")
        return 0

    def run(folder, monkeypatch):
        monkeypatch.setattr(triton_call, "version", version)
        monkeypatch.setattr(fa4, "_missing", fa4._missing.__wrapped__)
        for module in (fa4, cudnn, triton_flash):
            monkeypatch.setattr(module, "platform", lambda: "gpu")
            monkeypatch.setattr(module, "capability", lambda: (9, 0), raising=False)
        return run_command(choose, [])

    return run


def pickled(folder, monkeypatch):
    (folder / "pytorch_model.bin").touch()
    return run_command(lambda argv: Tensors(folder).specs, [])


def tokenizer(folder, monkeypatch):
    (folder / "tokenizer.model").write_bytes(b"damaged")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return run_command(lambda argv: HFTokenizer(folder).vocab_size, [])


PLAN = "plan", "--model.num_layers=1"
LM_EVAL = "evaluate", "--model=no/it", "--lm_eval=x", "--out={}/out"
VERIFY = "convert", "bptjax-to-hf", "no", "{}/out", "--verify"
NOT_INSTALLED, HALTED = "is not installed; pip install", "halted; None in sys.modules; pip install"
# A missing package, a call, its exit code, and what its line says.
CASES = [
    ("jax-triton", kernel("jax-triton", "auto"), 0, f'jax-triton {NOT_INSTALLED} -e ".[gpu]"'),
    ("triton", kernel("triton", "auto"), 0, f'not triton: triton {NOT_INSTALLED} -e ".[gpu]"'),
    ("triton", kernel("triton", "triton"), 2, f"attention 'triton': triton {NOT_INSTALLED}"),
    ("fa4-jax", kernel("fa4-jax", "auto"), 0, "not fa4: needs fa4-jax ("),
    ("fa4-jax", kernel("fa4-jax", "fa4"), 2, "attention 'fa4': needs fa4-jax ("),
    ("jax_plugins", process("jax_plugins", *PLAN, "--devices=h100"), 2, '-e ".[plan]"'),
    ("libtpu", process("libtpu", *PLAN, "--devices=v5e:4"), 2, 'pip install "jax[tpu]"'),
    ("lm_eval", command(*LM_EVAL), 2, 'pip install -e ".[eval]"'),
    ("tensorboardX", tracker("tensorboard"), 0, '-e ".[tensorboard]"); the run continues'),
    ("wandb", tracker("wandb"), 0, '-e ".[wandb]"); the run continues without it'),
    ("torch", command(*VERIFY), 2, "--verify: must have torch, which is not installed; pip"),
    ("torch", pickled, 2, "needs torch, which is not installed; pip install torch"),
    ("sentencepiece", tokenizer, 2, "pip install sentencepiece protobuf"),
    # Packages that come with bptjax.
    ("jax", process("jax", "train"), 2, f"jax {HALTED} -e ."),
    ("jax", process("jax", "plan"), 2, f"jax {HALTED} -e ."),
    ("gguf", command("convert", "to-gguf", "no", "{}/out"), 2, f"gguf {HALTED} -e ."),
]


@pytest.mark.parametrize(
    ("package", "call", "code", "said"),
    # JAX takes seconds to start in a process.
    fast(CASES, lambda package, *_: package not in ("jax_plugins", "libtpu")),
    ids=[f"{package}-{i}" for i, (package, *_) in enumerate(CASES)],
)
def test_a_missing_package_is_named_in_one_line(
    package, call, code, said, tmp_path, monkeypatch, capsys
):
    if package != "jax":
        hide("cutejax" if package == "fa4-jax" else package.replace("-", "_"), monkeypatch)
    assert call(tmp_path, monkeypatch) == code
    out, error = capsys.readouterr()
    assert "Traceback" not in error
    if code:
        *_, line = error.splitlines()
        assert line.startswith("error: ") and said in line
    else:
        assert error == "" and sum(said in line for line in out.splitlines()) == 1


def test_every_extra_has_a_case():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in extras["optional-dependencies"].keys() - {"test"}:
        assert any(f'-e ".[{extra}]"' in said for *_, said in CASES), extra
