"""Flags of every command: spelling, help text, one-line errors."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from bptjax.parsing.other_names import NO_COUNTERPART, OTHER_NAMES, own_name

EXIT_CODES = (
    "Exit codes: 0 done; 1 the command failed while it ran; 2 bad flags, config or data; "
    "130 stopped by Ctrl-C; 143 stopped by SIGTERM."
)
# Dtypes of weights and of computations.
DTYPES = ["float32", "bfloat16", "float16"]
# The flag that `run_command` reads.
DEBUG = "--debug", "show the traceback of an error"


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint about an unknown name: "; use …" for a key of another program (or the reason
    why bptjax has none), else "; nearest: …". Empty if no name is similar."""
    key, known = name.removeprefix("--"), [own.removeprefix("--") for own in names]
    dashes = "--" * name.startswith("--")
    if own := own_name(key, known):
        return f"; use {dashes}{own}"
    if (last := key.rpartition(".")[2]) in NO_COUNTERPART:
        return f"; {NO_COUNTERPART[last]}"
    if last in OTHER_NAMES:  # Known to other commands only.
        return ""
    # Compare a name without its group with the last parts of the known names.
    guesses = {own.rpartition(".")[2]: own for own in known} | {own: own for own in known}
    matches = difflib.get_close_matches(key, guesses, 1, 0.75)
    return f"; nearest: {dashes}{guesses[matches[0]]}" if matches else ""


def normalize(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Returns `argv` with underscores for hyphens in flag names, up to a sub-command.

    Raises:
      ValueError: a flag is unknown, or given twice with different values.
    """
    actions = parser._option_string_actions
    flags = [name for name in actions if name.startswith("--") and not name.endswith("+")]
    commands = {name for action in parser._actions for name in _commands(action)}
    result, given = [], {}
    for index, token in enumerate(argv):
        if token == "--":
            return result + argv[index:]
        if token.replace("_", "-") in commands:
            return [*result, token.replace("_", "-"), *argv[index + 1 :]]
        name, equals, value = token.partition("=")
        # argparse treats a token with a space as a value.
        if not name.startswith("--") or " " in name:
            result.append(token)
            continue
        name = "--" + name[2:].replace("-", "_")
        action = actions.get(name)
        # A flag may set one key of a dict: --model.rope_parameters.factor. Groups have hidden help.
        mapping = None if isinstance(parser, Parser) else actions.get(name.rpartition(".")[0])
        if action is None and mapping is not None and mapping.help != argparse.SUPPRESS:
            action = mapping
        if action is None:
            raise ValueError(f"unknown flag {name}{nearest(name, flags) or '; see --help'}")
        result.append(name + equals + value)
        if action.nargs == 0 or isinstance(action, argparse._AppendAction) or name.endswith("+"):
            continue
        values = [value] if equals else _values(argv[index + 1 :], action.nargs)
        if given.setdefault(name, values) != values:
            first, second = " ".join(given[name]), " ".join(values)
            raise ValueError(f"{name} is given twice, as {first} and as {second}; give it once")
    return result


def _values(following: list[str], nargs: int | str | None) -> list[str]:
    """Returns the values of a flag among the tokens that follow it."""
    end = next((i for i, token in enumerate(following) if token.startswith("--")), len(following))
    return following[: end if nargs in ("+", "*") else min(end, 1)]


def _commands(action: argparse.Action) -> Iterable[str]:
    return (action.choices or ()) if isinstance(action, argparse._SubParsersAction) else ()


class Help(argparse.HelpFormatter):
    """Formatter of help text with defaults, and with types instead of upper-case flag names."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if choices := self._choices(action):
            text += f" One of {choices.strip('{}').replace(',', ', ')}."
        if action.required and action.option_strings:
            return f"{text} (required)"
        if not action.option_strings or action.nargs == 0 or default in (None, [], "==SUPPRESS=="):
            return text
        several = action.nargs == "+"
        return f"{text} (default: {' '.join(map(str, default)) if several else _shown(default)})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names = {"int": "INT", "float": "NUMBER", "Path": "PATH"}
        return names.get(getattr(action.type, "__name__", ""), "TEXT")

    def _choices(self, action: argparse.Action) -> str:
        """Returns "{a,b,c}" if the choices do not fit next to the flag's name; else an empty
        string."""
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        fits = len(f"  {', '.join(action.option_strings)} {values}") <= self._width
        return "" if fits else values

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        values = "NAME" if self._choices(action) else values
        # Leave out the form with +, which appends to a list.
        names = [name for name in action.option_strings if not name.endswith("+")]
        return f"{', '.join(names)} {values}".rstrip()


class Switch(argparse._HelpAction):
    """A flag without a value; readers look for it in the arguments. Subclasses the action of
    `--help`, so that it is not a key of a config."""

    def __init__(self, name: str, help: str):
        super().__init__([name], help=help)

    def __call__(self, *_):
        pass


class Parser(argparse.ArgumentParser):
    """Parser of a command's flags. Raises one-line ValueErrors; refuses abbreviations."""

    def __init__(self, **options: Any):
        options.setdefault("epilog", EXIT_CODES)
        options.setdefault("formatter_class", Help)
        super().__init__(allow_abbrev=False, **options)
        self._add_action(Switch(*DEBUG))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse also calls this method for sub-commands.
        args = normalize(list(sys.argv[1:] if args is None else args), self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(one_line(message))


def _shown(value: Any) -> str:
    """Formats a default value as YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    return (
        "[" + ", ".join(map(_shown, value)) + "]" if isinstance(value, list | tuple) else str(value)
    )


def one_line(message: str) -> str:
    """Rewrites an error of argparse in the form `flag=value: must be …`."""
    if match := re.match(r"argument (\S+): invalid (\w+) value: '(.*)'", message):
        kind = {"int": "an integer", "float": "a number"}.get(match[2], match[2])
        return f"{match[1]}={match[3]}: must be {kind}"
    if match := re.match(
        r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message
    ):
        choices = match[3].replace("'", "").split(", ")
        if match[1].startswith("-"):
            return f"{match[1]}={match[2]}: must be one of {', '.join(choices)}"
        return f"unknown command {match[2]}{nearest(match[2], choices)}"
    if match := re.match(r"the following arguments are required: (.*)", message):
        return f"{match[1]} must be given; see --help"
    if match := re.match(r"argument (\S+): (expected .*)", message):
        return f"{match[1]}: {match[2]}"
    if match := re.match(r"unrecognized arguments: (.*)", message):
        return f"unexpected argument {match[1]}; see --help"
    return message
