"""The fast tier: all tests but those marked `thorough`. What a change usually breaks is in it."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], chosen: Iterable[Any] | Callable[..., Any]) -> list[Any]:
    """Returns the cases of a table as parameters, those that are not chosen marked `thorough`.

    Args:
      cases: values, or tuples of several parameters' values.
      chosen: the cases of the fast tier, or a function of a case's values that tells them.
    """
    is_chosen = chosen if callable(chosen) else list(chosen).__contains__
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) and callable(chosen) else (case,)
        marks = () if is_chosen(*values) else pytest.mark.thorough
        given = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*given, marks=marks))
    return found
