"""The pair that the tests of the bench time."""

import pytest

from specnb.models.loading import Pair
from specnb.models.shapes import Shape
from studies.speed.synthetic import synthetic_pair


@pytest.fixture(scope="package")
def pair() -> Pair:
    """Tiny random models that agree with probability 0.7."""
    return synthetic_pair(0.7, Shape(1, 32, 32, 2), Shape(1, 16, 16, 1), vocab=64, context=64)
