"""Random changes of files: of values and keys of JSON or YAML, and of bytes."""

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

# Values that readers may not expect.
ODD = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "1", "\0", "\ud800", "é", "nan", "../x", "/dev/zero"),
    *("a" * 5000, [], {}, [[]], [None], [1, "a"], {"a": {}}, {"": None}, "none", "auto", "torch"),
]


def changed(content: bytes, rng: random.Random, file: str, head: int | None) -> bytes:
    """Returns the content with up to three changes: of values and keys of a tree, or of bytes.

    Args:
      head: None for text; else the number of first bytes in which most changes are.
    """
    for _ in range(rng.choice([1, 1, 2, 3])):
        tree = None
        if head is None and not file.endswith(".jinja") and rng.random() < 0.8:
            with contextlib.suppress(ValueError, yaml.YAMLError, RecursionError):
                load = yaml.safe_load if file.endswith(".yaml") else json.loads
                tree = load(content.decode())
        if isinstance(tree, dict):
            tree = change_tree(tree, rng)
            # YAML has no lone surrogates.
            content = json.dumps(tree, default=str).encode()
        else:
            content = change_bytes(content, rng, head)
    return content


def change_tree(tree: Any, rng: random.Random) -> Any:
    """Changes a value or a key at a random place of a tree of dicts and lists."""
    places = list(walk(tree))
    if not places:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    value = holder[key]
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(["", "x", "class_path", "auto_map", str(key) + "s"])] = value
        case 2:
            other, at = rng.choice(places)
            with contextlib.suppress(LookupError):
                # A copy: a tree that holds itself is no JSON.
                holder[key] = json.loads(json.dumps(other[at], default=str))
        case 3:
            for _ in range(rng.choice([1, 3, 200])):
                value = rng.choice([[value], {"a": value}])
            holder[key] = value
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            factors = [-1, 0, 2, 10**6, 2**31, 0.5]
            with contextlib.suppress(OverflowError):
                holder[key] = value * rng.choice(factors) + rng.choice([0, 1, -1])
        case 5 if isinstance(value, str):
            holder[key] = rng.choice([value[1:], value + "x", value * 100, [value], value.upper()])
        case _:
            holder[key] = rng.choice(ODD)
    return tree


def walk(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (holder, key) of every value of a tree."""
    stack = [tree]
    while stack:
        holder = stack.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in list(items):
            yield holder, key
            if isinstance(value, dict | list):
                stack.append(value)


def change_bytes(content: bytes, rng: random.Random, head: int | None) -> bytes:
    found = bytearray(content)
    most = min(len(found), head) if head is not None and rng.random() < 0.8 else len(found)
    start = rng.randrange(most or 1)
    stop = min(start + rng.choice([1, 2, 8, 100]), len(found))
    match rng.randrange(6):
        case 0 if found:
            found[start] ^= 1 << rng.randrange(8)
        case 1:
            found = found[:start]
        case 2:
            del found[start:stop]
        case 3:
            found[start:start] = found[start:stop] * rng.choice([1, 3, 1000])
        case 4:
            found[start:stop] = rng.randbytes(stop - start)
        case _:
            odd = json.dumps(rng.choice(ODD)).encode()
            found[start:stop] = rng.choice(
                [odd, b"[" * 9999, b"{%", b"}}", b"\xff\xfe", b"**", b"*"]
            )
    return bytes(found)
