"""Writes docs/config.md, the reference of every config key, from the dataclasses of the config.

python scripts/config_reference.py
"""

import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from docstring_parser import parse

from bptjax.config import Config

REFERENCE = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """# Config

Every key of a config, by group. `.venv/bin/python scripts/config_reference.py` writes this page
from the dataclasses. In a YAML file a group is a mapping; on the command line a key is
`--group.key=value`.
`bptjax train --print_config` prints all keys as YAML, and `bptjax train --help` explains them.
[training.md](training.md#defaults-depend-on-the-work) lists the defaults that depend on the work.
"""


def describe(hint: Any) -> str:
    """Formats a type as a reader of YAML knows it."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return " ".join(f"`{x}`" for x in arguments)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(x) for x in arguments if x is not types.NoneType)
    if get_origin(hint) in (list, tuple):
        item = arguments[0]
        return "list of mappings" if dataclasses.is_dataclass(item) else f"list of {describe(item)}"
    names = {int: "integer", float: "number", bool: "`true` `false`", str: "text"}
    return names.get(hint, "mapping")


def default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}`"
    return "" if value is None or value in ([], ()) else f"`{value}`"


def attributes(kind: type) -> dict[str, str]:
    """Returns the description of each field, from the docstrings of the class and its bases."""
    found = {}
    for base in reversed(kind.__mro__):
        for parameter in parse(base.__doc__ or "").params:
            found[parameter.arg_name] = " ".join((parameter.description or "").split())
    return found


def group(title: str, kind: type) -> Iterator[str]:
    """Yields the section of a dataclass, and those of the mappings in its lists."""
    described, items = attributes(kind), []
    first = (kind.__doc__ or "").strip().splitlines()[0]
    yield f"\n## {title}\n\n{first}\n\n| key | value | default | |\n| --- | --- | --- | --- |\n"
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            items += [(f"{title}.{field.name}", field.type)] * (title != "the run")
            continue
        items += [
            (f"{title}.{field.name}, each", x)
            for x in get_args(field.type)
            if dataclasses.is_dataclass(x)
        ]
        text = described[field.name].replace("|", "\\|")
        cells = f"`{field.name}`", describe(field.type), default(field), text
        yield "|" + "|".join(f" {x} " if x else " " for x in cells) + "|\n"
    for name, item in items:
        yield from group(name, item)


def reference() -> str:
    """Returns the text of docs/config.md."""
    parts = [HEAD, *group("the run", Config)]
    for field in dataclasses.fields(Config):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            parts += group(field.name, field.type)
    return "".join(parts)


if __name__ == "__main__":
    REFERENCE.write_text(reference())
    print(REFERENCE, file=sys.stderr)
