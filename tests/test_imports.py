"""The rooms of the house: imports point down only and never in a circle; few modules are at top;
few take the root config."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bptjax

ROOT = Path(bptjax.__file__).parent

# Modules and packages of each floor, from the lowest floor up; docs/design.md describes them. A
# module may import from lower floors, and from its own package or floor where that makes no circle.
FLOORS = {
    "operations": ["ops"],
    "processes and files": ["run"],
    "flags and keys": ["parsing"],
    "data": ["data"],
    "devices": ["parallel"],
    "models": ["models"],
    "weights": ["weights", "optim"],
    "objectives": ["objectives"],
    "tasks": ["tasks"],
    "root config": ["config", "config_parser"],
    "training": ["cost", "training"],
    "evaluation": ["evaluation"],
    "commands": ["cli"],
    "package": ["__init__", "__main__", "train"],
}
HEIGHTS = {room: height for height, rooms in enumerate(FLOORS.values()) for room in rooms}
OPS_MAY_IMPORT = {"jax", "jaxtyping", "numpy", "cutejax", "fa4_jax", "jax_triton", "triton"}


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
            assert node.module
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
    return HEIGHTS[name.split(".")[1]]


def test_every_module_has_a_floor():
    assert {name.split(".")[1] for name in modules()} == HEIGHTS.keys()


def test_the_floors_are_those_of_the_design():
    text = (ROOT.parent / "docs" / "design.md").read_text()
    table = text.partition("| floor | modules | purpose |\n")[2].partition("\n\n")[0]
    described, name = {}, ""
    for line in table.splitlines()[1:]:
        title, modules, _ = (cell.strip() for cell in line.strip("|").split("|"))
        name = title or name
        described.setdefault(name, []).extend(re.findall(r"`(\w+)`", modules))
    assert {name: sorted(rooms) for name, rooms in described.items()} == {
        name: sorted(rooms) for name, rooms in FLOORS.items()
    }


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


def test_few_modules_stand_at_the_top():
    assert len({path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}) <= 4


def test_nothing_imports_the_module_of_the_command_line():
    """As an attribute of the package, it would replace the function `bptjax.train`."""
    assert not [a for a, b in arrows() if b == "bptjax.train"]


def takes_the_root_config(tree):
    """Whether a module names `Config` or `TrainSpec` in a signature, or reads `spec.config`."""
    for node in ast.walk(tree):
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if any(re.search(r"\b(Config|TrainSpec)\b", ast.unparse(x)) for x in hints if x):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "config":
            if ast.unparse(node.value).endswith("spec"):
                return True
    return False


@pytest.mark.parametrize(
    ("line", "takes"),
    [
        ("def f(config: 'Config | None'): ...", True),
        ("def f(*specs: TrainSpec): ...", True),
        ("def f() -> Config: ...", True),
        ("x: TrainSpec", True),
        ("self._spec.config.train", True),
        ("def f(config: ModelConfig, spec: Spec): model.config", False),
    ],
)
def test_a_module_that_takes_the_root_config_is_noticed(line, takes):
    assert takes_the_root_config(ast.parse(line)) == takes


def test_few_modules_take_the_root_config():
    found = [
        n for n, path in modules().items() if takes_the_root_config(ast.parse(path.read_text()))
    ]
    assert 0 < len(found) <= 30, found


def test_ops_import_only_arrays():
    for name, path in modules().items():
        if floor(name) == 0:
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
