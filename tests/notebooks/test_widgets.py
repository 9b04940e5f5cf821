"""What the figures to move compute, in JavaScript, is what the library computes."""

import base64
import json
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from notebooks.support import widgets
from specnb import residual, theory, token_verification
from specnb.distributions import sample
from specnb_audit.alternatives import alternative_distributions, condense_distributions
from specnb_audit.evidence import Evidence, log_mean
from specnb_audit.predict_devices import GPUS

ROOT = Path(__file__).parents[2]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node, which runs the arithmetic of the figures here")
RANDOM = np.random.default_rng(1)
PAIRS = [*RANDOM.dirichlet(np.ones(4), (50, 2)), np.full((2, 4), 0.25), np.eye(4)[:2], np.array([[0.5, 0.5, 0, 0]] * 2)]


def computed(expression: str, cases: list[Any]) -> Any:
    """The value of `expression`, a function of the parts of a case, for each of them."""
    module = Path(widgets.__file__).with_name("widgets.js").read_text(encoding="utf-8")
    code = f"{module}\nconsole.log(JSON.stringify({json.dumps(cases)}.map({expression})));"
    done = subprocess.run([str(NODE), "--input-type=module"], input=code, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


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


def test_wrong_rules_and_evidence_are_the_audits() -> None:
    counts = RANDOM.integers(1, 40, (50, 4))
    cases = [[p.tolist(), q.tolist(), n.tolist()] for (p, q), n in zip(PAIRS, counts, strict=False)]
    values = "[Object.values(RULES).map((rule) => emitted(rule(p, q))), alternatives(p, q), evidence(betsOn(p, q), n)]"
    for (p, q), n, (rules, mine, log) in zip(PAIRS, counts, computed(f"([p, q, n]) => {values}", cases), strict=False):
        tokens = np.repeat(range(4), n)
        at = [torch.tensor(np.tile(probs, (len(tokens), 1))) for probs in (p, q)]
        condensed = condense_distributions(torch.tensor(tokens), at[0], at[0], at[1])
        bets: dict[str, list[Any]] = {}
        for name, distributions in alternative_distributions(condensed, torch.zeros_like(condensed.p)):
            bets[name] = bets.get(name, []) + [one[0, :4].numpy() for one in distributions]
        for name, ours in mine.items():
            np.testing.assert_allclose(ours, bets[name], atol=1e-12)
        planted = [p, *bets["no-residual"], q, bets["lenience"][2], *bets["greedy-draft"]]
        np.testing.assert_allclose(rules, planted, atol=1e-12)
        ratios = np.concatenate([np.array(ours) for ours in mine.values()]).T[tokens] / p[tokens, None]
        logs = Evidence([name for name in mine for _ in mine[name]], 0).add(ratios, np.zeros((len(tokens), 0), bool))
        assert log == pytest.approx(log_mean(logs)[-1] / np.log(10), rel=1e-4, abs=1e-4)


def test_a_moved_distribution_sums_to_one() -> None:
    cases = [[p.tolist(), x, value] for (p, _), x, value in product(PAIRS, range(4), (0.0, 0.3, 0.97))]
    for (_, x, value), probs in zip(cases, computed("([p, x, value]) => moved(p, x, value)", cases), strict=True):
        assert (probs[x], sum(probs)) == (value, pytest.approx(1))


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


def test_devices_and_presets_are_those_of_the_data() -> None:
    for device, ridge in computed("() => Object.entries(RIDGES)", [0])[0][1:]:
        assert ridge == pytest.approx(1000 * GPUS[device][0] / GPUS[device][1])
    table = pd.read_csv(ROOT / "data/reference/table2_and_4_walltime.csv")
    published = set(zip(table.alpha, table.cost_ratio, table.gamma, strict=True))
    assert {tuple(row) for row in computed("() => Object.values(PRESETS)", [0])[0]} <= published


def test_an_output_says_what_the_figure_shows() -> None:
    bundle, _ = widgets.Widget(figure="landscape")._repr_mimebundle_()
    assert widgets.TEXT["landscape"] in bundle["text/html"]


def test_a_still_picture_takes_the_place_of_words() -> None:
    """Pages that run no script show one of the two, and words first."""
    figure, _ = plt.subplots()
    bundle, _ = widgets.Widget(figure="residual", still=figure)._repr_mimebundle_()
    assert "text/html" not in bundle
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert 'data-widget="residual"' in widgets.place(**bundle[widgets.PLACE])
