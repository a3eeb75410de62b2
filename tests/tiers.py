"""The fast tier: all tests but those marked `thorough`. What a change usually breaks is in it."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def fast(cases: Iterable[Any], chosen: Collection[Any] | Callable[..., bool]) -> list[Any]:
    """Returns the cases of a table as parameters, those that are not chosen marked `thorough`.

    Args:
      cases: values, or tuples of several parameters' values.
      chosen: the cases of the fast tier, or a function of a case's values that tells them.

    Raises:
      ValueError: no case is chosen.
    """
    found, number = [], 0
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        is_fast = chosen(*values) if callable(chosen) else case in chosen
        number += is_fast
        found.append(pytest.param(*values, marks=() if is_fast else pytest.mark.thorough))
    if not number:
        raise ValueError(f"{chosen}: must choose a case")
    return found
