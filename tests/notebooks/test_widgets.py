"""What the figures to move compute, in JavaScript, is what the library computes."""

import base64
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from script_files import NEEDS_NODE, ROOT, computed

from notebooks.support import widgets
from specnb import residual, theory, token_verification
from specnb.distributions import sample

pytestmark = NEEDS_NODE
RANDOM = np.random.default_rng(1)
PAIRS = [*RANDOM.dirichlet(np.ones(4), (50, 2)), np.full((2, 4), 0.25), np.eye(4)[:2], np.array([[0.5, 0.5, 0, 0]] * 2)]


def test_masses_and_steps() -> None:
    uniforms = RANDOM.random((len(PAIRS), 3))
    cases = [[p.tolist(), q.tolist(), u.tolist()] for (p, q), u in zip(PAIRS, uniforms, strict=True)]
    found = computed("([p, q, u]) => ((r) => [r.instead, emitted(r), step(r, u)])(RULES[NAMES[0]](p, q))", cases)
    for (p, q), u, (left, output, done) in zip(PAIRS, uniforms, found, strict=True):
        target, draft, uniform = (torch.tensor(values) for values in (p, q, u))
        np.testing.assert_allclose(left, residual(target, draft), atol=1e-12)
        np.testing.assert_allclose(output, p, atol=1e-12)
        drafted = sample(draft, uniform[0])
        both = torch.stack([target, target])
        kept, token, _ = token_verification(both, draft[None], drafted[None], uniform[1:2], uniform[2])
        assert done == {"drafted": drafted, "kept": bool(kept), "token": drafted if kept else token}


def test_speed_up_and_the_best_gamma() -> None:
    free = float("inf")  # v(n) = 1
    cases = list(product((0.0, 0.3, 0.8, 1.0), (0, 1, 5, 20), (0.0, 0.05, 0.4), (1, 8, 256), (153.0, free)))
    values = "[speedUp(a, g, c, b, r), bestGamma(a, c, b, r), verifyCost(g + 1, b, r)]"
    found = computed(f"([a, g, c, b, r]) => {values}", cases)
    for (alpha, gamma, c, batch, ridge), (speed, best, v) in zip(cases, found, strict=True):

        def cost(n: Any, batch: int = batch, ridge: float = ridge) -> Any:
            return theory.roofline(n, ridge, batch)

        assert speed == pytest.approx(float(theory.walltime_improvement(alpha, gamma, c, cost)))
        gains = theory.walltime_improvement(alpha, [best, int(theory.optimal_gamma(alpha, c, cost, 20))], c, cost)
        assert gains[0] == pytest.approx(gains[1])  # of equal ones, rounding may choose another
        assert v == pytest.approx(float(cost(gamma + 1)))


def test_presets_are_those_of_the_data() -> None:
    table = pd.read_csv(ROOT / "data/reference/table2_and_4_walltime.csv")
    published = set(zip(table.alpha, table.cost_ratio, table.gamma, strict=True))
    assert {tuple(row) for row in computed("() => Object.values(PRESETS)", [0])[0]} <= published


def test_a_still_picture_takes_the_place_of_words() -> None:
    """Pages that run no script show one of the two, and words first."""
    figure, _ = plt.subplots()
    bundle, _ = widgets.Widget(figure="residual", still=figure)._repr_mimebundle_()
    assert "text/html" not in bundle
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert 'data-widget="residual"' in widgets.place(**bundle[widgets.PLACE])
