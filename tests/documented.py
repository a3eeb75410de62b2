"""Runs the examples of docs/extending.md."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def example(section: str) -> dict[str, Any]:
    """Runs the only example of a section, as the page prints it, and returns its names."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    # Dataclasses look up the module that they are defined in.
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, PAGE.name, "exec"), names)
    return names
