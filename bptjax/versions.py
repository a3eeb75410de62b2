"""Versions of Python and of the packages that a run uses."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "bptjax",
    "jax",
    "jaxlib",
    "flax",
    "transformers",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    "jax-triton",
    "triton",
)


def versions() -> dict[str, str | None]:
    """Returns the version of Python and of each package; None if the package is not installed."""
    return {"Python": platform.python_version()} | {name: installed(name) for name in PACKAGES}


def installed(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
