"""How long acceptance remembers: the autocorrelation that notebook 03 shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def autocorrelation(rows: list[Array], lags: int) -> Array:
    """The autocorrelation `(lags,)` at lags 1 to `lags` of several series about their common mean.

    >>> autocorrelation([np.array([1.0, -1.0] * 4)], lags=2)
    array([-1.,  1.])
    """
    mean = np.concatenate(rows).mean()
    centred = [row - mean for row in rows]
    variance = np.concatenate(centred).var()
    products = [[row[lag:] * row[:-lag] for row in centred if len(row) > lag] for lag in range(1, lags + 1)]
    return np.array([np.concatenate(pairs).mean() / variance for pairs in products])
