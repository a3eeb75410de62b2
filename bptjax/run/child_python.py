"""Python in child processes."""

import os
import sys

# With -P, neither a script's directory nor the current one is searched for modules.
PYTHON = sys.executable, "-P"


def python_environment() -> dict[str, str]:
    """Returns the environment in which `PYTHON` finds the modules that this process finds, except
    those of the current directory that `sys.path` holds as an empty text."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
