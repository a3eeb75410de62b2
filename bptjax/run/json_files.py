"""JSON files of checkpoints, tokenizers and datasets."""

import json
from pathlib import Path
from typing import Any

# File of a run with the facts of its report that no other file holds.
REPORT_FACTS = "run.json"


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      ValueError: the file does not exist, or does not hold a JSON object.
    """
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return value
