"""Makes long documents of the Linux kernel's source: each holds the text files of a directory.

On Debian and Ubuntu, `apt-get download linux-source-6.1 && dpkg -x linux-source-6.1_*.deb .` gives
usr/src/linux-source-6.1.tar.xz; a tarball of kernel.org will do as well. `python
scripts/linux_documents.py linux-source-6.1.tar.xz OUT` writes OUT/train.jsonl and
OUT/held_out.jsonl, whose documents come from different directories.
"""

import argparse
import hashlib
import json
import random
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ENDINGS = {".c", ".h", ".S", ".rst", ".txt", ".dts", ".dtsi", ".py", ".pl", ".sh", ".rs"}
NAMES = {"Kconfig", "Makefile"}


def read_directories(tarball: Path) -> dict[str, str]:
    """Returns the text of each directory: its files in the order of their names, each after a line
    with its path."""
    files: dict[str, dict[str, str]] = defaultdict(dict)
    with tarfile.open(tarball) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if member.isfile() and (path.suffix in ENDINGS or path.name in NAMES):
                content = archive.extractfile(member)
                assert content is not None
                text = content.read().decode(errors="replace")
                files[str(path.parent)][str(path)] = f"=== {path} ===\n{text}\n"
    return {name: "".join(each[p] for p in sorted(each)) for name, each in sorted(files.items())}


def documents(directories: dict[str, str], least: int, most: int) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each document of `least` to `most` characters. A longer
    directory gives several."""
    for name, text in directories.items():
        for start in range(0, len(text), most):
            if len(text) - start >= least:
                yield name, text[start : start + most]


def held_out(name: str) -> bool:
    """Returns whether a directory is held out: one in 16, with all directories below it."""
    top = "/".join(name.split("/")[1:4])
    return hashlib.sha256(top.encode()).digest()[0] < 16


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tarball", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--least", type=int, default=30_000, help="characters of a document")
    parser.add_argument("--most", type=int, default=600_000, help="characters of a document")
    parser.add_argument("--total", type=int, default=120_000_000, help="characters to train on")
    parser.add_argument("--held_out", type=int, default=20_000_000, help="characters held out")
    args = parser.parse_args(argv)
    try:
        directories = read_directories(args.tarball)
    except (OSError, EOFError, tarfile.TarError) as error:
        # Errors of tarfile have a line for each compression.
        reason = getattr(error, "strerror", None) or str(error).partition(":")[0]
        parser.error(f"{args.tarball}: {reason}")
    made = list(documents(directories, args.least, args.most))
    random.Random(0).shuffle(made)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, most in (("train", args.total), ("held_out", args.held_out)):
        written = 0
        with (args.out / f"{name}.jsonl").open("w") as file:
            for directory, text in made:
                if held_out(directory) == (name == "held_out") and written < most:
                    file.write(json.dumps(dict(directory=directory, text=text)) + "\n")
                    written += len(text)
        print(f"{name}: {written:,} characters")


if __name__ == "__main__":
    main()
