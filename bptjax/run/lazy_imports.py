"""Libraries that take seconds to import, imported on first use."""

import os
from typing import Any


def transformers() -> Any:
    """Returns the library `transformers`, without its warning about a missing torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
