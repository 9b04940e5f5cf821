import numpy as np
import pytest

from notebooks.support.autocorrelation import autocorrelation


def test_autocorrelation_by_hand() -> None:
    assert autocorrelation([np.array([1.0, -1, 1, -1])], 3) == pytest.approx([-1, 1, -1])
    # About the common mean 0, and never from one row into the next.
    assert autocorrelation([np.array([1.0, 1]), np.array([-1.0, -1])], 1) == pytest.approx([1])
    assert autocorrelation([np.array([2.0, 2, 2]), np.array([-6.0])], 2) == pytest.approx([4 / 12, 4 / 12])
