"""Python in child processes."""

import os
import sys

# With -P, Python does not put a script's directory or the current directory on `sys.path`.
PYTHON = sys.executable, "-P"


def python_environment() -> dict[str, str]:
    """Returns the environment in which `PYTHON` finds the modules that this process finds, except
    in the current directory, which `sys.path` may hold as an empty string."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
