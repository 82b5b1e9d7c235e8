"""Whether `tl.multiple_of`, `tl.max_contiguous` and `tl.max_constancy` are true (`Checks(hints=True)`).

The compiler reads or writes several elements at once where a hint says that it may. A false one gives wrong elements or
a misaligned address on a GPU. Triton's axis analysis gives the hints their meaning: along a dimension, the first
element of each run of consecutive numbers is a multiple of the value; aligned groups of that many are such a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Find = Callable[[np.ndarray, Sequence[int], int], str]  # (data, values, step) -> what is wrong, or ""


def misaligned(data: np.ndarray, values: Sequence[int], step: int) -> str:
    """The first number that begins a run along a dimension and is no multiple of the value there.

    >>> misaligned(np.array([16, 17, 18, 40, 41]), [16], 1)
    'a run begins at 40'
    >>> misaligned(np.int32(7), [4], 1)
    '7'
    """
    if data.ndim == 0:
        return str(data) if values and data % values[0] else ""
    for dim, value in enumerate(values):
        rows = np.moveaxis(data, dim, -1)
        begins = np.ones(rows.shape, bool)
        begins[..., 1:] = rows[..., 1:] != rows[..., :-1] + step
        wrong = rows[begins & (rows % value != 0)]
        if wrong.size:
            return f"a run begins at {wrong[0]}" + (f" along dimension {dim}" if data.ndim > 1 else "")
    return ""


def uneven(difference: int) -> Find:
    """Finds a group of `value` elements along a dimension whose neighbours do not differ by `difference` steps.

    >>> uneven(1)(np.array([0, 1, 2, 3, 0, 0, 0, 0]), [4], 1)
    '0 follows 0'
    """

    def find(data: np.ndarray, values: Sequence[int], step: int) -> str:
        for dim, value in enumerate(values if data.ndim else ()):
            rows = np.moveaxis(data, dim, -1)
            size = min(value, rows.shape[-1])
            groups = rows[..., : rows.shape[-1] // size * size].reshape(-1, size)
            wrong = groups[:, 1:] != groups[:, :-1] + difference * step
            if wrong.any():
                row, column = np.argwhere(wrong)[0]
                return f"{groups[row, column + 1]} follows {groups[row, column]}" + (
                    f" along dimension {dim}" if data.ndim > 1 else ""
                )
        return ""

    return find
