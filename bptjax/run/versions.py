"""Versions of Python and of the packages that a run uses, and the tested combinations."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

# Incremented by each change of bptjax that makes a run compute other bits from the same state.
ARITHMETIC = 3
# Packages that compute steps, and packages that turn data into tokens.
COMPUTING = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "jax-triton"),
    *("triton", "fa4-jax", "nvidia-cutlass-dsl", "transformers", "tokenizers"),
)
PACKAGES = ("bptjax", "flax", "nvidia-cuda-runtime", *COMPUTING)


@dataclass(frozen=True)
class Tested:
    """Versions that bptjax is tested with.

    Attributes:
      python, jax: prefixes of the versions.
      devices: kinds of devices: cpu, or keys of `devices.KINDS`; empty for all.
    """

    python: str
    jax: str
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" on {', '.join(self.devices)}" if self.devices else ""
        return f"Python {self.python} with jax {self.jax}{where}"


# On a GPU with CUDA 13.
TESTED = (
    Tested("3.11", "0.10.2"),
    Tested("3.12", "0.11.2", ("h100", "h200")),
    Tested("3.12", "0.12", ("cpu",)),
)


def is_tested(device: str) -> bool:
    """Returns whether the installed versions are tested on a device: cpu, or a key of
    `devices.KINDS`."""
    python, jax = platform.python_version(), installed("jax") or ""
    return any(
        f"{python}.".startswith(f"{each.python}.")
        and f"{jax}.".startswith(f"{each.jax}.")
        and (not each.devices or device in each.devices)
        for each in TESTED
    )


def versions() -> dict[str, str | None]:
    """Returns the version of Python and of each package; None if the package is not installed."""
    return {"Python": platform.python_version()} | {name: installed(name) for name in PACKAGES}


def computing_versions() -> dict[str, str]:
    """Returns the versions that determine the bits of a run, for its checkpoints."""
    versions = {name: installed(name) for name in ("bptjax", *COMPUTING)}
    return {"arithmetic": str(ARITHMETIC)} | {name: v for name, v in versions.items() if v}


def describe_changes(saved: object) -> str:
    """Formats the differences from the versions in a checkpoint; empty if there are none. Ignores
    the version of bptjax, which changes no bits by itself."""
    if not isinstance(saved, dict):
        return "an earlier bptjax, which did not record versions"
    own = computing_versions()
    changed = {name: (saved.get(name), own.get(name)) for name in saved | own}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    bptjax = changed.pop("bptjax", (own.get("bptjax"),) * 2)
    lines = [
        f"{name} {then or 'absent'} → {now or 'absent'}" for name, (then, now) in changed.items()
    ]
    if "arithmetic" in changed:
        then, now = (x or "not installed" for x in bptjax)
        lines[0] = f"bptjax {then} → {now} ({lines[0]})"
    return ", ".join(lines)


def describe_differences(own: dict[str, str], wanted: dict[str, str]) -> str:
    """Formats the differences between two results of `computing_versions`, as what to install;
    empty if there are none."""
    names = sorted(own | wanted)
    pairs = [(x, own.get(x, "absent"), wanted.get(x, "absent")) for x in names]
    return ", ".join(f"{name} {two} instead of {one}" for name, one, two in pairs if one != two)


def installed(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
