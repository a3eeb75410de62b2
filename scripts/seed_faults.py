"""Measures which faults the tests find: seeds one-line faults in a copy of the repository, and runs
the tests on each until one fails.

    python scripts/seed_faults.py --out scripts/results/seeded_faults.jsonl

Faults are drawn by seed from the syntax trees of all rooms of bptjax. A row is written for each,
and a fault that has a row is not run again. The tests that name the module run first, then those of
its room, then the rest of the fast tier. `--tier thorough` runs the thorough tier on the faults
that the fast tier missed. `--faults 3 4 --tests TEST…` runs only these tests on these faults, and
notes a test that finds one. `--reason NUMBER TEXT` notes why no test finds a fault.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIERS = {
    "fast": "not gpu and not timing and not thorough",
    "thorough": "thorough and not gpu and not timing",
}
# A run of tests that takes longer does not end.
TIMEOUT_S = 3600
COMPARISONS: dict[type, tuple[str, str]] = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.NotIn: ("not in", "in")},
}
OPERATORS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.FloorDiv: ("//", "*"),
}
REDUCTIONS = "psum", "pmax", "pmean"


@dataclass(frozen=True)
class Fault:
    """A change of one line of a file."""

    room: str
    file: str
    line: int
    kind: str
    before: str
    after: str


# An edit: line, first and last byte + 1 in the line, and the new text.
Edit = tuple[int, int, int, str]


def between(a: ast.expr, b: ast.expr, line: bytes, old: str, new: str) -> Iterator[Edit]:
    """Replaces an operator between two expressions on one line."""
    if a.end_lineno == b.lineno and a.end_col_offset is not None:
        gap = line[a.end_col_offset : b.col_offset].decode()
        if gap.split() == old.split():
            yield b.lineno, a.end_col_offset, b.col_offset, f" {new} "


def signs(node: ast.AST, line: bytes) -> Iterator[Edit]:
    texts = ast.JoinedStr, ast.List, ast.Tuple
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            both = left, right
            strings = any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in both)
            if not strings and not any(isinstance(x, texts) for x in both):
                yield from between(left, right, line, *OPERATORS[type(op)])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield operand.lineno, node.col_offset, operand.col_offset, ""


def comparisons(node: ast.AST, line: bytes) -> Iterator[Edit]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from between(left, right, line, *COMPARISONS[type(op)])


def off_by_one(node: ast.AST, line: bytes) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=int(n)) if not isinstance(n, bool) and 0 <= n <= 64:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, str(n + 1)


def dropped_arguments(node: ast.AST, line: bytes) -> Iterator[Edit]:
    match node:
        case ast.Call(args=args, keywords=keywords):
            given = [*args, *(k.value for k in keywords)]
            for keyword in keywords:
                place = given.index(keyword.value)
                end = keyword.value.end_col_offset or 0
                if keyword.arg is None or keyword.lineno != keyword.value.end_lineno:
                    continue
                if place and given[place - 1].end_lineno == keyword.lineno:
                    yield keyword.lineno, given[place - 1].end_col_offset or 0, end, ""
                elif line[end : end + 1] == b",":
                    yield keyword.lineno, keyword.col_offset, end + 1, ""


def dtypes(node: ast.AST, line: bytes) -> Iterator[Edit]:
    match node:
        case ast.Attribute(attr="float32", end_col_offset=int(end)):
            yield node.end_lineno or 0, end - len("float32"), end, "float16"
        case ast.Call(func=ast.Attribute(attr="astype", value=value), end_col_offset=int(end)):
            if value.end_lineno == node.end_lineno:
                yield node.end_lineno or 0, value.end_col_offset or 0, end, ""


def reductions(node: ast.AST, line: bytes) -> Iterator[Edit]:
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[x, *_]) if name in REDUCTIONS:
            if node.lineno == node.end_lineno:
                text = line[x.col_offset : x.end_col_offset].decode()
                yield node.lineno, node.col_offset, node.end_col_offset or 0, text


def skipped_branches(node: ast.AST, line: bytes) -> Iterator[Edit]:
    match node:
        case ast.If(test=test) if test.lineno == test.end_lineno:
            yield test.lineno, test.col_offset, test.end_col_offset or 0, "False"


KINDS: dict[str, Callable[[ast.AST, bytes], Iterator[Edit]]] = {
    "sign": signs,
    "comparison": comparisons,
    "off by one": off_by_one,
    "dropped argument": dropped_arguments,
    "dtype": dtypes,
    "missing reduction": reductions,
    "skipped branch": skipped_branches,
}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of functions' bodies, without annotations and the texts of errors. In Python
    3.11, nodes within f-strings have wrong places."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise):
                yield child
                yield from nodes(child)


def faults(file: str, source: str) -> Iterator[Fault]:
    """Yields all faults of a file, in the order of its lines."""
    lines, tree = source.encode().split(b"\n"), ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found: dict[Fault, None] = {}
    for node in {
        id(n): n for f in functions for statement in f.body for n in (statement, *nodes(statement))
    }.values():
        for kind, edits in KINDS.items():
            # The last line, where an edit of a node of several lines is.
            for row in dict.fromkeys((getattr(node, "lineno", 0), getattr(node, "end_lineno", 0))):
                for line, start, stop, text in edits(node, lines[row - 1]) if row else ():
                    if line != row:
                        continue
                    old = lines[row - 1]
                    new = (old[:start] + text.encode() + old[stop:]).decode()
                    room = str(Path(file).parent)
                    found[Fault(room, file, row, kind, old.decode(), new)] = None
    yield from found


def changes(fault: Fault, source: str) -> bool:
    """Returns whether the file with the fault is another program."""
    try:
        return ast.dump(ast.parse(apply(source, fault))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def apply(source: str, fault: Fault) -> str:
    """Seeds a fault in its line, or in the next equal one if the file has changed."""
    lines = source.split("\n")
    equal = (i for i, line in enumerate(lines, 1) if line == fault.before)
    lines[min(equal, key=lambda i: abs(i - fault.line)) - 1] = fault.after
    return "\n".join(lines)


def draw(seed: int, number: int, root: Path = ROOT) -> list[Fault]:
    """Draws faults of one room after the other: a kind, and a fault of the kind in the room."""
    rooms: dict[str, dict[str, list[Fault]]] = {}
    for path in sorted((root / "bptjax").rglob("*.py")):
        file = str(path.relative_to(root))
        for fault in faults(file, path.read_text()):
            rooms.setdefault(fault.room, {}).setdefault(fault.kind, []).append(fault)
    drawn: dict[Fault, None] = {}
    for i in range(10 * number):
        rng, kinds = random.Random(f"{seed}/{i}"), rooms[sorted(rooms)[i % len(rooms)]]
        fault = rng.choice(kinds[rng.choice(sorted(kinds))])
        if changes(fault, (root / fault.file).read_text()):
            drawn[fault] = None
        if len(drawn) == number:
            break
    return list(drawn)


def relevant(file: str, root: Path = ROOT) -> list[str]:
    """Returns all test files: that of the module, those that name it, those of its room, and the
    others."""
    module = Path(file).with_suffix("")
    name = module.parent.name if module.name == "__init__" else module.name
    dotted, package = ".".join(module.parts), re.escape(".".join(module.parts[:-1]))
    named = re.compile(rf"{re.escape(dotted)}\b|from {package} import [^\n]*\b{name}\b")

    def order(test: str) -> tuple[bool, ...]:
        room = Path(test).parent.parts[1:2] == module.parts[1:-1][:1]
        own = Path(test).stem == f"test_{name}"
        return not own, not named.search((root / test).read_text()), not room

    tests = (str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py"))
    return sorted(sorted(tests), key=order)


def copy(directory: Path, tests: Sequence[str]) -> None:
    """Copies the repository's files, and checks that the copy imports itself and that the tests are
    collected."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in names.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    code = "import bptjax; print(bptjax.__file__)"
    collect = ["-m", "pytest", "-q", "-n0", "-m", "", "--collect-only", *tests]
    for command in (["-c", code], collect):
        how = dict(cwd=directory, env=environment(directory), stdin=subprocess.DEVNULL)
        done = subprocess.run([sys.executable, *command], **how, capture_output=True, text=True)
        if done.returncode or not done.stdout.startswith((str(directory / "bptjax"), "tests/")):
            raise RuntimeError(f"{directory}: {done.stdout[-999:]} {done.stderr[-999:]}")


def environment(directory: Path) -> dict[str, str]:
    paths = directory, directory / "tests", directory / "scripts"
    return os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


def find(fault: Fault, tests: Sequence[str], tier: str, directory: Path) -> str | None:
    """Returns the first test of the tier that fails because of the fault. A test that fails without
    the fault too is left out."""
    path = directory / fault.file
    source, left_out = path.read_text(), []
    while True:
        path.write_text(apply(source, fault))
        try:
            found = first_failure([*tests, *left_out], TIERS[tier], directory)
        finally:
            path.write_text(source)
        if not found or "::" not in found or not first_failure([found], TIERS[tier], directory):
            return found
        left_out.append(f"--deselect={found}")


def first_failure(tests: Sequence[str], marked: str, directory: Path) -> str | None:
    """Returns the first of the marked tests that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-m", marked]
    command += ["-p", "no:cacheprovider", "-rfE", *tests]
    how = dict(cwd=directory, env=environment(directory), stdin=subprocess.DEVNULL)
    try:
        done = subprocess.run(command, **how, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{tests[0]}: no end in {TIMEOUT_S} s"
    if done.returncode in (0, 5):  # 5: no test of the tier.
        return None
    failed = re.search(r"^(?:FAILED|ERROR) ([^\[\n]*?(?:\[.*?\])?)(?: - .*)?$", done.stdout, re.M)
    return failed[1] if failed else f"exit code {done.returncode}: {done.stderr[-200:]}"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_due(row: dict[str, Any], tier: str) -> bool:
    """Returns whether the tier before has missed the fault, and this one has not run on it."""
    return not row.get("found") and row.get("tier") == (None if tier == "fast" else "fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument("--number", type=int, default=40, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=TIERS, default="fast")
    parser.add_argument(
        "--faults", type=int, nargs="+", help="numbers; all that are due if not set"
    )
    parser.add_argument("--tests", nargs="+", help="run only these")
    parser.add_argument("--reason", nargs=2, metavar=("NUMBER", "TEXT"))
    args = parser.parse_args()
    drawn = enumerate(draw(args.seed, args.number))
    rows: dict[int, dict[str, Any]] = {
        n: {"number": n, "seed": args.seed} | asdict(fault) for n, fault in drawn
    }
    rows |= {row["number"]: row for row in read(args.out)}

    def write(number: int, **found: Any) -> None:
        rows[number] |= found
        known = [row for _, row in sorted(rows.items()) if "tier" in row]
        args.out.write_text("".join(json.dumps(row) + "\n" for row in known))

    if args.reason:
        return write(int(args.reason[0]), reason=args.reason[1])
    with tempfile.TemporaryDirectory(prefix="bptjax-faults-") as scratch:
        copy(Path(scratch), args.tests or ["tests"])
        for n in args.faults or [n for n, row in rows.items() if is_due(row, args.tier)]:
            fault = Fault(**{f.name: rows[n][f.name] for f in fields(Fault)})
            tests, start = args.tests or relevant(fault.file), time.monotonic()
            found = find(fault, tests, args.tier, Path(scratch))
            seconds = round(time.monotonic() - start)
            if found or not args.tests:
                write(n, found=found, tier=args.tier, seconds=seconds)
            print(n, fault.file, fault.kind, found, f"{seconds} s", sep="\t", flush=True)


if __name__ == "__main__":
    main()
