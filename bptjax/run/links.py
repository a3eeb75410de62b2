"""Checks of links, special files and file names in directories that others have written."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Subdirectories of a model or a run whose files are also read or written.
INNER = "hf", "checkpoints", "additional_chat_templates", "profile", "stacks"
# Model files in which transformers treats some values as file names, and the keys of these values.
NAMING = "tokenizer_config.json", "special_tokens_map.json", "config.json"
NAMES = "_file", "_files", "vocab", "merges", "init_inputs"
# Old tokenizers hold their author's path here. transformers does not read it.
IGNORED = "special_tokens_map_file"


def check_links(directory: Path) -> None:
    """Checks that a model, tokenizer, adapter or run directory refers to nothing outside it.

    It may hold files and directories, links that stay inside, and configs that name no file
    outside. A snapshot in the hub's cache, `models--owner--name/snapshots/…`, consists of links to
    files in `models--owner--name/blobs`, so its links may lead anywhere in `models--owner--name`.
    Subdirectories other than `INNER` are not searched.

    Raises:
      ValueError: a link or a name leads out of the directory (the error names both ends), or an
        entry is a pipe, a socket or a device.
    """
    root = Path(os.path.realpath(directory))
    for parent in root.parents:  # `directory` may also be inside a snapshot.
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            root = parent.parent
            break
    left, seen = [directory, *(directory / name for name in INNER)], set()
    while left:
        here = left.pop()
        real = os.path.realpath(here)
        if real in seen or not os.path.isdir(real):
            continue
        seen.add(real)
        _check_names(Path(here), root)
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = Path(os.path.realpath(entry.path))
                    if not target.is_relative_to(root):
                        raise ValueError(
                            f"{entry.path}: must not link to {target}, outside of {root}; put the "
                            "file itself there"
                        )
                is_directory = os.path.isdir(entry.path)
                # Opening a pipe blocks forever, and a device may have no end.
                if not is_directory and os.path.exists(entry.path) and not entry.is_file():
                    raise ValueError(f"{entry.path}: must be a file or a directory; remove it")
                if here != directory and is_directory:
                    left.append(Path(entry.path))


def _check_names(directory: Path, root: Path) -> None:
    for name in NAMING:
        file = directory / name
        try:
            keys = json.loads(file.read_text()) if file.is_file() else {}
        except (OSError, ValueError, RecursionError):  # The file's reader reports it.
            continue
        for key, text in _names(keys):
            # transformers resolves some names from the current directory.
            for path in (directory / text, Path(text)):
                if os.path.exists(path) and not os.path.isdir(path):
                    target = Path(os.path.realpath(path))
                    if not target.is_relative_to(root):
                        raise ValueError(
                            f"{file}: {key}={text!r}: must not name {target}, outside of {root}; "
                            "remove the key"
                        )


def _names(tree: Any) -> Iterator[tuple[str, str]]:
    """Yields the keys and values that transformers may treat as file names."""
    left: list[tuple[str, Any]] = [("", tree)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(k if k.endswith(NAMES) else key, v) for k, v in value.items()]
        elif isinstance(value, list):
            left += [(key, item) for item in value]
        elif isinstance(value, str) and key.endswith(NAMES) and key != IGNORED:
            yield key, value
