"""Builds configs from trees of keys, with errors in the form `key=value: must be …`."""

import dataclasses
import math
import re
from argparse import SUPPRESS
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin

from bptjax.parsing.flags import DEBUG, EXIT_CODES, Help, Switch, nearest, one_line
from bptjax.parsing.other_names import MAIN_KEYS

# Value of a group that sets none of its keys: `execution: auto`.
AUTO = "auto"


def parse_tree(tree: Mapping[str, Any], kind: type) -> Any:
    """Returns a dataclass of type `kind` from the tree of its keys.

    Raises:
      ValueError: unknown key, wrong type or a value out of range, in one line.
    """
    refuse_imports(kind)
    if "config" in tree:
        raise ValueError("unknown key config")
    parser = make_parser(kind, "", "", ())
    tree = {key: x for key, x in tree.items() if (key, x) != ("execution", AUTO)}
    return instantiate(kind, parser, parser.parse_object(tree))


def refuse_imports(kind: type) -> None:
    """Keeps jsonargparse from importing the module of a `class_path` before it refuses it."""
    from jsonargparse import set_parsing_settings

    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=_items(kind))


def instantiate(kind: type, parser: Any, parsed: Any) -> Any:
    """Returns the dataclass of parsed keys.

    Raises:
      ValueError: a value is out of range.
    """
    from jsonargparse import Namespace

    for name in _groups(kind):
        # jsonargparse accepts a number instead of a group, and fails on it later.
        if not isinstance(parsed[name], Namespace):
            raise ValueError(f"{name}={parsed[name]}: must be a group of keys{_main_key(name)}")
    for key, hint in _hints(kind).items():
        _check_value(key, parsed[key], hint)
    values = parser.instantiate(parsed)
    return kind(**{f.name: values[f.name] for f in fields(kind)})


@cache
def make_parser(
    kind: type, command: str, description: str, switches: tuple[tuple[str, str], ...]
) -> Any:
    """Builds the parser of a command, cached because building takes longer than parsing."""
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    hints = _hints(kind)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise ValueError(_one_line(one_line(message), hints))

    class Formatter(Help, DefaultHelpFormatter):
        pass

    switches = *switches, DEBUG
    names = [f"[{name}]" for name, _ in switches]
    wrap = " " if len(names) < 3 else "\n" + " " * len("usage: ")
    parser = Parser(
        prog=f"bptjax {command}",
        usage=f"%(prog)s [--config FILE] [--KEY VALUE ...]{wrap}{' '.join(names)}",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="YAML file of the keys below"
    )
    for name, text in switches:
        parser._add_action(Switch(name, text))
    parser.add_class_arguments(kind, None)
    flags = parser._option_string_actions
    flags["--print_config"].help = "print all keys as YAML, and exit"
    for name, action in flags.items():
        if name.endswith(".help"):
            action.help = f"show the keys of {name.removesuffix('.help')}, and exit"
    for name in _groups(kind):
        group: Any = flags[f"--{name}"]
        group.help = SUPPRESS  # --group FILE, in addition to --config.
        group.basetype = None  # Text is a file, not a class to import.
    for key, hint in hints.items():
        flags[f"--{key}"].metavar = _metavar(hint)
        if get_origin(hint) is dict:
            # A flag such as --key.entry=value would keep the default's other entries.
            parser.set_defaults({key: {}})
    return parser


def _check_value(key: str, value: Any, hint: Any) -> None:
    """Refuses values that jsonargparse lets through.

    Raises:
      ValueError: null for a key without that value; an integer that needs more than 32 bits; NaN,
        or a number beyond float32.
    """
    if value is None and type(None) not in get_args(hint):
        raise ValueError(f"{key}=null: must be {_expected(hint)}")
    numbers = float in (hint, *get_args(hint)) or key.endswith("seed")
    if type(value) is int and abs(value) >= 2**31 and not numbers:
        raise ValueError(f"{key}={value}: must be less than 2^31")
    # Runs compute in float32.
    if isinstance(value, float) and not (abs(value) < 3.4e38 or math.isinf(value)):
        raise ValueError(f"{key}={value}: must be a number below 3.4e38")


def _groups(kind: type, prefix: str = "") -> list[str]:
    """Returns the names of the groups of keys, including nested groups."""
    groups = []
    for f in fields(kind):
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            groups += [prefix + f.name, *_groups(f.type, f"{prefix}{f.name}.")]
    return groups


def _hints(kind: type, prefix: str = "") -> dict[str, Any]:
    """Returns the type of each key, `{"group.key": type}`."""
    hints = {}
    for f in fields(kind):
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            hints |= _hints(f.type, f"{prefix}{f.name}.")
        else:
            hints[prefix + f.name] = f.type
    return hints


def _items(kind: type) -> list[str]:
    """Returns the import paths of the dataclasses that are items of lists."""
    items = [item for hint in _hints(kind).values() for item in get_args(hint)]
    items = [item for item in items if dataclasses.is_dataclass(item)]
    return [f"{item.__module__}.{item.__qualname__}" for item in items]


def _metavar(hint: Any) -> str:
    """Formats a type for help text."""
    arguments = [a for a in get_args(hint) if a not in (type(None), ...)]
    origin = get_origin(hint)
    if hint is bool or origin is Literal:
        return "{" + ",".join(map(str, arguments or ("true", "false"))) + "}"
    if origin in (list, tuple):
        return f"[{_metavar(arguments[0])}, ...]"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "{KEY: VALUE, ...}"
    if arguments:  # A union.
        return "|".join(map(_metavar, arguments))
    return {int: "INT", float: "NUMBER"}.get(hint, "TEXT")


def _expected(hint: Any) -> str:
    """Formats a type for errors."""
    arguments = [a for a in get_args(hint) if a is not ...]
    origin = get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        return f"a list, each item {_expected(arguments[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "keys and values, {key: value}"
    if arguments:
        return " or ".join(map(_expected, arguments))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "null")


def _main_key(group: str) -> str:
    """Formats the remedy for a value given instead of a group."""
    return f"; use {MAIN_KEYS[group]}" if group in MAIN_KEYS else ""


def _one_line(message: str, hints: dict[str, Any]) -> str:
    """Rewrites an error of jsonargparse in the form `key=value: must be …`."""
    text = " ".join(message.split())
    for pattern in (
        r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'",
        r"Option '(?P<key>[\w.]+)' is not accepted",
        r"^unknown key (?P<key>[\w.]+)",  # A key of a list item.
    ):
        if match := re.search(pattern, text):
            parts = match.groupdict()
            key = ".".join(part for part in (parts.get("group"), parts["key"]) if part)
            groups = ", ".join(dict.fromkeys(name.split(".")[0] for name in hints))
            return f"unknown key {key}{nearest(key, hints) or f'; known: {groups}'}"
    if match := re.match(r"Parser key \"([\w.]+)\": Unable to load config '(.*?)'", text):
        auto = "auto or " if match[1] == "execution" else ""
        return f"{match[1]}={match[2]}: must be {auto}a group of keys{_main_key(match[1])}"
    match = re.match(r"Parser key \"([\w.]+)\": (.*)", text)
    if not match or match[1] not in hints:
        return text
    key, error = match.groups()
    items = [kind for kind in get_args(hints[key]) if dataclasses.is_dataclass(kind)]
    if items and re.match(r"Parser key|unknown key|\w+ must be given", error):
        return f"{key}: {_one_line(error, _hints(items[0]))}"
    error = re.sub(r".* class_path '(.*?)': .*", r"Got value: \1", error)
    value = re.search(r".*(?:Got|Given) value: (.*?)(?: Subclass types .*)?$", error)
    return f"{key}={value[1]}: must be {_expected(hints[key])}" if value else text
