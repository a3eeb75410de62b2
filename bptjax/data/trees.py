"""Lays out sequences that begin alike as a tree of tokens, in which the beginning is there once."""

from collections.abc import Sequence

import numpy as np

from bptjax.data.examples import Example


def tree(rows: Sequence[Example]) -> Example:
    """Returns one example that holds all rows, depth-first.

    Rows share their first tokens, as far as all arrays of the rows agree. Labels are arrays too, so
    the last token of a prompt, whose label is the first token of an answer, is not shared: a copy
    begins each answer. Each token then has one label, and sees the same tokens as in its own row.
    Two answers to a prompt of P tokens are laid out as

        prompt[:-1] | prompt[-1], answer[:-1] | prompt[-1], other[:-1]

    Args:
      rows: examples of one sequence each, with the same arrays; not empty.

    Returns:
      The rows' arrays, and int32 arrays: `positions`, the token's position in its row; `ends`, the
      index after the last token that continues it, for `Mask.ends`; and `leaves`, the number of
      rows that share the token.
    """
    names = list(rows[0])
    values = [np.stack([row[name] for name in names]) for row in rows]
    runs: list[tuple[int, int, int, int, int]] = []

    def visit(members: list[int], start: int, at: int) -> int:
        """Adds the tokens of these rows from position `start`; returns the index after them."""
        first, length = values[members[0]], min(values[row].shape[1] for row in members)
        agree = [values[row][:, start:length] == first[:, start:length] for row in members]
        shared = np.logical_and.reduce([equal.all(0) for equal in agree])
        stop = length if shared.all() else start + int(shared.argmin())
        end, place = at + stop - start, len(runs)
        runs.append((0, 0, 0, 0, 0))
        branches: dict[tuple, list[int]] = {}
        for row in members:
            if values[row].shape[1] > stop:
                branches.setdefault(tuple(values[row][:, stop].tolist()), []).append(row)
        for branch in branches.values():
            end = visit(branch, stop, end)
        runs[place] = members[0], start, stop, end, len(members)
        return end

    visit(list(range(len(rows))), 0, 0)
    pieces = [
        {name: x[start:stop] for name, x in rows[row].items()}
        | {
            "positions": np.arange(start, stop, dtype=np.int32),
            "ends": np.full(stop - start, end, np.int32),
            "leaves": np.full(stop - start, leaves, np.int32),
        }
        for row, start, stop, end, leaves in runs
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
