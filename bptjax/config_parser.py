"""Parses a config from a YAML file and flags."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bptjax.config import Config
from bptjax.parsing.flags import normalize
from bptjax.parsing.tree_parser import AUTO, instantiate, make_parser, refuse_imports
from bptjax.run.yaml_files import compose


def parse(
    argv: list[str],
    description: str = "",
    kind: type = Config,
    command: str = "train",
    *,
    defaults: Sequence[str] = (),
    switches: Sequence[tuple[str, str]] = (),
) -> Any:
    """Returns a dataclass of type `kind` from `--config FILE` and flags `--group.key=value`.

    Flags override the file wherever `--config` stands, and override the flags in `defaults`.

    Args:
      switches: name and help of flags that are not keys; the caller looks them up in `argv`.

    Raises:
      ValueError: one line about an unknown or repeated key, a bad value or a missing file.
    """
    import yaml
    from jsonargparse import get_loader, set_loader

    rest, load = _without_auto(argv), get_loader("yaml")

    def load_without_auto(text: str) -> Any:
        loaded = load(text)
        # Drop the file's group if a flag, or the file itself, says `execution: auto`.
        if isinstance(loaded, dict) and (rest != argv or loaded.get("execution") == AUTO):
            loaded.pop("execution", None)
        return loaded

    set_loader("execution", load_without_auto, exceptions=(yaml.YAMLError,))
    refuse_imports(kind)
    parser = make_parser(kind, command, description, tuple(switches))
    parser.parser_mode = "execution"
    try:
        parsed = parser.parse_args(_config_first([*defaults, *normalize(rest, parser)]))
    except RecursionError as error:
        raise ValueError("--config: must not be nested so deeply") from error
    except OverflowError as error:  # An integer is too large for a float.
        raise ValueError("--config: every number must be below 3.4e38") from error
    return instantiate(kind, parser, parsed)


def _without_auto(argv: list[str]) -> list[str]:
    """Returns `argv` without `--execution=auto` and `--execution auto`."""
    rest: list[str] = []
    for token in argv:
        if token == AUTO and rest[-1:] == ["--execution"]:
            rest.pop()
        elif token != f"--execution={AUTO}":
            rest.append(token)
    return rest


def _config_first(argv: list[str]) -> list[str]:
    """Returns `argv` with `--config` first: in jsonargparse, the later of file and flag wins.

    Raises:
      ValueError: the file cannot be read, or repeats a key, which YAML would silently accept.
    """
    files, rest, tokens = [], [], iter(argv)
    for token in tokens:
        if token == "--config":
            files = [value for value in (next(tokens, None),) if value is not None]
            rest += [] if files else [token]
        elif token.startswith("--config="):
            files = [token.removeprefix("--config=")]
        else:
            rest.append(token)
    for file in files:
        _check_file(Path(os.path.expanduser(file)))
    return [f"--config={file}" for file in files] + rest


def _check_file(file: Path) -> None:
    """Checks for repeated keys and for errors that jsonargparse reports without the file's name.

    Raises:
      ValueError: the file has such an error.
    """
    import yaml

    def check(node: Any, prefix: str) -> None:
        seen = set()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = prefix + str(key.value)
            if name in seen:
                raise ValueError(
                    f"{file}, line {key.start_mark.line + 1}: {name} is given twice; give it once"
                )
            seen.add(name)
            check(value, f"{name}.")

    try:
        tree = compose(file)
    except ValueError as error:
        raise ValueError(f"--config={file}: {error}") from error
    if "config" in (key.value for key, _ in tree.value):
        raise ValueError(f"--config={file}: unknown key config")  # jsonargparse would open a file.
    check(tree, "")
