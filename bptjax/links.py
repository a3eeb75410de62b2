"""Symbolic links in directories that others have written."""

import os
from pathlib import Path

# Directories of a model or a run whose files are read too.
INNER = "hf", "checkpoints", "additional_chat_templates"


def check_links(directory: Path) -> None:
    """Checks that no link in a model, tokenizer, adapter or run directory leads out of it.

    A snapshot of the hub's cache, `models--owner--name/snapshots/…`, consists of links to files of
    `models--owner--name/blobs`, so its links may lead to all of `models--owner--name`. Other
    subdirectories than `INNER` are not searched.

    Raises:
      ValueError: a link leads out of the directory; the error names both ends.
    """
    root = Path(os.path.realpath(directory))
    for parent in root.parents:  # Also of a subdirectory of a snapshot.
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
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = Path(os.path.realpath(entry.path))
                    if not target.is_relative_to(root):
                        raise ValueError(
                            f"{entry.path}: must not link to {target}, outside of {root}; put the "
                            "file itself there"
                        )
                if here != directory and os.path.isdir(entry.path):
                    left.append(Path(entry.path))
