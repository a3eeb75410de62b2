"""Names of config keys, `group.key`, in nested dataclasses and trees."""

import dataclasses
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dataclasses to `{"group.key": value}`."""
    flat = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        elif isinstance(value, list):
            flat[prefix + f.name] = [
                dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for x in value
            ]
        else:
            flat[prefix + f.name] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of `{"group.key": value}`.

    Raises:
      ValueError: a group is also a value.
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, key = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{group}={inner}: must be a group of keys")
        inner[key] = value
    return tree


def replace_keys(config: Any, changes: Mapping[str, Any]) -> Any:
    """Returns nested dataclasses with the values of `{"group.key": value}`."""
    values = {}
    for name, value in nest(changes).items():
        old = getattr(config, name)
        is_group = dataclasses.is_dataclass(old) and isinstance(value, dict)
        values[name] = replace_keys(old, value) if is_group else value
    return replace(config, **values)


def check_seed(name: str, seed: int) -> None:
    """Checks a seed.

    Raises:
      ValueError: the seed is negative or has more than 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name}={seed}: must be in [0, 2^32)")
