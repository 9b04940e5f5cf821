"""The control: what the engine does without speculation is not the speculation's fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samplers import SAMPLER_BUGS, sample_row, tables

from specnb.audit import Aim, Engine, audit
from specnb.audit.control import gap_p_value
from specnb.audit.numerics import Numerics
from specnb.audit.report import Report
from specnb.audit.run import Settings, audit_completions
from specnb.audit.teacher_forcing import Completion, Models
from specnb.sampling.distributions import Sampling

TABLE = tables()[0]


def chain(prefix: tuple[int, ...]) -> torch.Tensor:
    return TABLE[prefix[-1]]


def sequences(count: int, n: int, seed: int, **bug: object) -> list[Completion]:
    p, q = tables()
    return [Completion([0], list(sample_row(p, q, n, seed + row, **bug).tokens)) for row in range(count)]  # type: ignore[arg-type]


def run(given: list[Completion], control: list[Completion], **settings: Any) -> Report:
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    return audit(chain, tokens, prompts=prompts, engine=Engine(control=control), progress=False, **settings)


def test_what_the_control_has_too_is_the_engines() -> None:
    exact, bug = sequences(12, 60, 0), SAMPLER_BUGS["inverted residual"].settings
    broken, again = sequences(12, 60, 100, **bug), sequences(12, 60, 200, **bug)
    speculation = run(broken, exact)
    assert speculation.rejected
    assert speculation.control is not None
    assert speculation.control.source == "speculation"
    assert "the speculation's, not in the control" in str(speculation)
    engine = run(broken, again)
    assert engine.control is not None
    assert engine.control.source in ("engine", "both")
    assert engine.control.shared
    assert engine.to_dict()["control"]["report"]["verdict"] == "rejected"
    exact_again = run(exact, exact[::-1])
    assert exact_again.control is not None
    assert exact_again.control.source is None


def greedy(seed: int, flips: int, n: int = 200) -> list[Completion]:
    """The argmax at every position but `flips`, which have the second token."""
    generator = np.random.default_rng(seed)
    flipped = set(generator.choice(n, size=flips, replace=False).tolist())
    tokens = [0]
    for at in range(n):
        tokens.append(int(TABLE[tokens[-1]].topk(2).indices[int(at in flipped)]))
    return [Completion([0], tokens[1:])]


def explained_by_control(flips: int, control_flips: int) -> Report:
    """The engine's dtype is taken to explain the control's tokens; more of them are another matter."""
    models = Models(chain, Sampling(0))
    numerics = Numerics(1, logit=5.0, tv=0.0, tv_mean=0.0, nats=0.0)

    class Known(Engine):
        def numerics(self, *arguments: object) -> tuple[None, Callable[[], Numerics]]:
            return None, lambda: numerics

    return audit_completions(
        models, greedy(0, flips), Settings(progress=False), Known(control=greedy(1, control_flips))
    )


def test_as_many_near_ties_as_the_control_are_numerics() -> None:
    report = explained_by_control(5, 6)
    assert report.verdict == "numerics"
    assert report.control is not None
    assert report.control.alike
    assert "numerics as in the control" in str(report)


def test_the_p_value_of_exchangeable_gaps_is_one_or_more_in_a_thousand_as_often_as_it_says() -> None:
    generator, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        here, there = ([(gap, 0.0) for gap in generator.exponential(size=generator.poisson(8))] for _ in range(2))
        alarms += gap_p_value(here, 1000, there, 1000) < 0.05
    assert alarms <= 30  # thirty-one or more have a chance of 1e-4 at a rate of 0.05


@pytest.mark.parametrize(("here", "there"), [([(0.1, 0.0)] * 40, []), ([(2.0, 0.0)] * 40, [(0.1, 0.0)] * 40)])
def test_more_or_larger_gaps_are_found(here: list[tuple[float, float]], there: list[tuple[float, float]]) -> None:
    assert gap_p_value(here, 1000, there, 1000) < 1e-6
    assert gap_p_value(there, 1000, here, 1000) > 0.5
    assert gap_p_value(here, 1000, here, 1000) > 0.5


def test_the_p_value_of_tokens_that_the_control_lacks_is_the_chance_that_all_are_here() -> None:
    """Each of three tests has this chance: that of the number, of the logits and of the mass."""
    chance = math.comb(1000, 3) / math.comb(2500, 3)
    assert gap_p_value([(0.1, 0.2)] * 3, 1000, [], 1500) == pytest.approx(3 * chance)


def test_rows_that_share_noise_are_dependent_and_each_is_right() -> None:
    rows = sequences(12, 60, 0)
    shared = [row for row in rows for _ in range(3)]
    report = run(shared, [])
    assert report.verdict == "dependent"
    assert report.rejected
    assert report.rows_alone is not None
    assert report.rows_alone.sequences == 12
    assert "each row has the right distribution, and rows share noise" in str(report)
    ignored = run(shared[:6], [], aim=Aim(ignore=("noise-of-texts", "same-tokens")))
    assert "same-tokens" not in ignored.by_alternative
    with pytest.raises(ValueError, match="ignore has nonsense"):
        run(rows, [], aim=Aim(ignore=("nonsense",)))


def test_violations_can_be_ignored() -> None:
    given: dict[str, Any] = {"prompts": [[0]], "progress": False, "max_new_tokens": 5}
    assert audit(chain, [[1, 2]], **given).violations == {"wrong-length": 1}
    assert not audit(chain, [[1, 2]], aim=Aim(ignore=("wrong-length",)), **given).rejected


def test_a_suspected_model_is_found_sooner_than_by_any_other_bet() -> None:
    """Noise in the logits without direction: only the likelihood ratio against the noisy model knows it."""
    generator = torch.Generator().manual_seed(0)
    noisy = TABLE.log() + 0.3 * torch.randn(TABLE.shape, generator=generator, dtype=torch.float64)
    noisy = torch.softmax(noisy, dim=-1)
    given = []
    for row in range(25):
        given.append(Completion([0], list(sample_row(noisy, noisy, 120, row).tokens)))
    blind = run(given, [])
    known = run(given, [], aim=Aim(suspected=lambda prefix: noisy[prefix[-1]]))
    assert known.diagnosis == "suspected-model"
    assert known.found_after is not None
    assert known.found_after < (blind.found_after or known.tokens)
    exact = run(sequences(25, 60, 500), [], aim=Aim(suspected=lambda prefix: noisy[prefix[-1]]))
    assert not exact.rejected


def test_impossible_tokens_that_the_control_lacks_are_the_speculations() -> None:
    def certain(prefix: tuple[int, ...]) -> list[float]:
        return [1.0, 0.0]

    possible = Engine(control=[Completion([], [0] * 40)])
    report = audit(certain, [[1] * 40], prompts=[[]], engine=possible, progress=False)
    assert report.control is not None
    assert (report.control.shared, report.control.only_here) == ([], ["impossible"])


def test_near_ties_as_in_the_control_are_called_the_engines_own() -> None:
    report = explained_by_control(5, 6)
    assert "the same engine without speculation has as many impossible tokens, and as large ones" in str(report)
