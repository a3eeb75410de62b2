"""The floors of the house: imports point down only, and never in a circle."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import bptjax

ROOT = Path(bptjax.__file__).parent

# Floor of each room, by longest matching prefix. A module may import from lower floors, and from
# its own package or floor where that makes no circle.
FLOORS = {
    "ops": 1,
    "parallel": 2,
    "data": 2,
    "models": 3,
    "lora": 4,
    "remat": 4,
    "loss_scale": 4,
    "optimizer": 4,
    "schedule": 4,
    "update_rules": 4,
    "checkpoint": 4,
    "metrics": 4,
    "trackers": 4,
    "progress": 3,
    "hf": 4,
    "command_line": 3,
    "cli": 7,
    "config": 5,
    "lazy_imports": 2,
    "pretrained": 5,
    "loading": 5,
    "adapter_export": 5,
    "generation": 5,
    "training": 6,
    "train": 7,
    "preview": 7,
    "convert": 7,
    "generate": 7,
    "evaluate": 7,
    "evaluate_report": 5,
    "compare": 7,
    "compare_report": 5,
    "__init__": 8,
}
OPS_MAY_IMPORT = {"jax", "jaxtyping", "numpy", "jax_triton", "triton"}


def modules():
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
        for path in sorted(ROOT.rglob("*.py"))
    }


def imports(name, path):
    """Absolute names of everything that `path` imports, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import; write it out"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows():
    known = modules()
    packages = {name.removesuffix(".__init__"): name for name in known if name.endswith("__init__")}
    for name, path in known.items():
        for target in imports(name, path):
            target = packages.get(target, target)
            if target in known and target != name:
                yield name, target


def floor(name):
    return FLOORS[name.split(".")[1]]


def test_every_module_has_a_floor():
    assert all(name.split(".")[1] in FLOORS for name in modules())


def test_imports_point_down():
    upward = [(a, b) for a, b in arrows() if floor(b) > floor(a)]
    assert not upward


def test_no_circles():
    graph = {}
    for a, b in arrows():
        graph.setdefault(a, set()).add(b)
    done, path = set(), []

    def visit(node):
        assert node not in path, f"circle: {' -> '.join(path[path.index(node) :] + [node])}"
        if node not in done:
            path.append(node)
            for target in graph.get(node, ()):
                visit(target)
            done.add(path.pop())

    for node in graph:
        visit(node)


def test_ops_import_only_arrays():
    for name, path in modules().items():
        if floor(name) == 1:
            outside = {t.split(".")[0] for t in imports(name, path)} - {"bptjax"}
            assert outside - set(sys.stdlib_module_names) <= OPS_MAY_IMPORT, (name, outside)


def test_family_names_stay_in_hf():
    for room in ("models", "ops"):
        for path in (ROOT / room).rglob("*.py"):
            # But for llama3, which in Hugging Face's schema is a way to scale rotary positions.
            assert not re.search(r"llama(?!3)", path.read_text().lower()), path


def test_import_does_no_work():
    """Importing the package touches no backend."""
    code = "import bptjax, jax._src.xla_bridge as b; assert not b._backends"
    subprocess.run([sys.executable, "-c", code], check=True)
