"""`bptjax configs`: lists the configs that come with the package, and copies one of them."""

import re
from argparse import Namespace
from functools import partial
from pathlib import Path

from bptjax.cli.main import launch
from bptjax.parsing.flags import nearest

# Directory of the configs: in a wheel, and in a clone of the repository.
PLACES = [Path(__file__).parents[1] / "config_files", Path(__file__).parents[2] / "configs"]


main = partial(launch, "configs")


def run(args: Namespace) -> int:
    """Prints the names of all configs, or copies the config `args.name`.

    Raises:
      ValueError, OSError: the name is unknown, or the file already exists or cannot be written.
    """
    configs = {file.stem: file for place in PLACES for file in sorted(place.glob("*.yaml"))}
    if args.name is None:
        for name, file in configs.items():
            print(f"{name:<28}{_purpose(file.read_text())}")
        return 0
    name = args.name.removesuffix(".yaml")
    if name not in configs:
        known = nearest(name, configs) or "; bptjax configs lists the names"
        raise ValueError(f"unknown config {args.name}{known}")
    target = args.dest / f"{name}.yaml" if args.dest.is_dir() else args.dest
    try:
        with target.open("x") as file:
            file.write(configs[name].read_text())
    except FileExistsError as error:
        raise ValueError(f"DEST={target}: must not exist yet; choose another file") from error
    print(f"written: {target}")
    return 0


def _purpose(text: str) -> str:
    """Returns the start of the comment at the head of a config."""
    comment = re.match(r"(#.*\n)*", text)
    words = comment[0].replace("#", "").split() if comment else []
    return re.split(r"[.:;] ", f"{' '.join(words)} ")[0]
