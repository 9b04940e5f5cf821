"""What the figures to move compute of wrong rules, evidence and devices, in JavaScript, is what the audit
computes."""

from typing import Any

import numpy as np
import pytest
import torch
from script_files import NEEDS_NODE, computed

from specnb_audit.alternatives import alternative_distributions, condense_distributions
from specnb_audit.evidence import Evidence, log_mean
from specnb_audit.predict_devices import GPUS

pytestmark = NEEDS_NODE
RANDOM = np.random.default_rng(1)
PAIRS = RANDOM.dirichlet(np.ones(4), (50, 2))


def test_wrong_rules_and_evidence_are_the_audits() -> None:
    counts = RANDOM.integers(1, 40, (50, 4))
    cases = [[p.tolist(), q.tolist(), n.tolist()] for (p, q), n in zip(PAIRS, counts, strict=True)]
    values = "[Object.values(RULES).map((rule) => emitted(rule(p, q))), alternatives(p, q), evidence(betsOn(p, q), n)]"
    for (p, q), n, (rules, mine, log) in zip(PAIRS, counts, computed(f"([p, q, n]) => {values}", cases), strict=True):
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


def test_devices_are_those_of_the_data() -> None:
    for device, ridge in computed("() => Object.entries(RIDGES)", [0])[0][1:]:
        assert ridge == pytest.approx(1000 * GPUS[device][0] / GPUS[device][1])
