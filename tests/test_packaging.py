"""The package as it is installed: declared dependencies, packages of the wheel, configs."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import bptjax
from bptjax.cli import configs
from bptjax.config_parser import parse

ROOT = Path(bptjax.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Modules whose distribution has another name; jax requires the jaxlib of its own version.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "orbax": "orbax-checkpoint",
    "jaxlib": "jax",
    "cutejax": "fa4-jax",
}


def names(requirements):
    return {re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for text in requirements}


def imports(tree):
    """Yields the distribution of each import of another package."""
    for node in ast.walk(tree):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module]
        for module in modules:
            top = module.split(".")[0]
            if top != "bptjax" and top not in sys.stdlib_module_names:
                yield DISTRIBUTIONS.get(top, top).lower().replace("_", "-")


def test_imports_are_declared():
    """Packages of extras are imported inside functions, so that nothing needs them before."""
    project = PROJECT["project"]
    required = names(project["dependencies"])
    extras = set().union(*map(names, project["optional-dependencies"].values()))
    for file in (ROOT / "bptjax").rglob("*.py"):
        tree = ast.parse(file.read_text())
        missing = set(imports(tree)) - required - extras
        assert not missing, (file, missing)
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if not file.name.endswith("triton_kernels.py"):
            assert not set(imports(ast.Module(top, []))) - required, file


def test_the_wheel_has_every_package():
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "bptjax").rglob("__init__.py")
    }
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert set(listed) == packages | {"bptjax.config_files"} and len(listed) == len(set(listed))


def test_configs_are_listed_and_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert configs.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert [line.split()[0] for line in lines] == [file.stem for file in files]
    assert "quickstart                  A byte-level decoder on the Python standard" in "\n".join(
        lines
    )
    for argv, target in (
        (["quickstart"], "quickstart.yaml"),
        (["quickstart.yaml", "mine.yaml"], "mine.yaml"),
    ):
        assert configs.main(argv) == 0
        assert capsys.readouterr().out == f"written: {target}\n"
        assert parse([f"--config={target}"]) == parse([f"--config={ROOT}/configs/quickstart.yaml"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["quickstar"], "unknown config quickstar; nearest: quickstart"),
        (["xyz"], "unknown config xyz; bptjax configs lists the names"),
        (["quickstart", "there.yaml"], "DEST=there.yaml: must not exist yet; choose another file"),
        (["quickstart", "no/where.yaml"], "error: no/where.yaml: No such file or directory\n"),
    ],
)
def test_a_config_that_cannot_be_copied_is_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("kept")
    assert configs.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert Path("there.yaml").read_text() == "kept"
