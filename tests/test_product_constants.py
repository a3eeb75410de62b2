"""Tests run the product as users get it: none changes a size or a time of a module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def trees(*folders):
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT), ast.parse(file.read_text())


def is_number(value):
    """Whether an expression has numbers and operations only."""
    kinds = ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop
    return all(
        isinstance(node, kinds) and isinstance(getattr(node, "value", 0), int | float)
        for node in ast.walk(value)
    )


def numbers(tree):
    """Yields the names of the constants of a module that are numbers."""
    for node in tree.body:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = (
                zip(target.elts, node.value.elts, strict=True)
                if several
                else [(target, node.value)]
            )
            for name, value in pairs:
                if (
                    isinstance(name, ast.Name)
                    and name.id.isupper()
                    and len(name.id) > 1
                    and is_number(value)
                ):
                    yield name.id


NUMBERS = {name for _, tree in trees("bptjax", "scripts") for name in numbers(tree)}


def changes(tree):
    """Yields the constants that a test may change: attributes that it assigns, and names that it
    gives as texts, such as to `setattr`, or as keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2]
        elif isinstance(node, ast.keyword):
            yield node.arg


@pytest.mark.parametrize(
    "line",
    [
        "packing.BUFFER_TOKENS = 8",
        "packing.BUFFER_TOKENS, x = 8, 9",
        "monkeypatch.setattr(packing, 'BUFFER_TOKENS', 8)",
        "patch('bptjax.data.packing.BUFFER_TOKENS', 8)",
        "for name in ('BUFFER_TOKENS',): setattr(packing, name, 8)",
        "vars(packing).update(BUFFER_TOKENS=8)",
    ],
)
def test_a_change_is_noticed(line):
    assert {"BUFFER_TOKENS"} == NUMBERS.intersection(changes(ast.parse(line)))


def test_no_test_changes_a_number_of_the_product():
    """A test that wants a number smaller gives it as an argument."""
    assert len(NUMBERS) > 80
    found = {str(file): NUMBERS.intersection(changes(tree)) for file, tree in trees("tests")}
    own = {"tests/test_product_constants.py"}
    assert not {file: names for file, names in found.items() if names and file not in own}
