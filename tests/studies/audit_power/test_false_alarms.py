"""A smaller edition of the recorded check: exact samplers on distributions, and what the table says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from samplers import sample_row, tables

from specnb.distributions import Sampling
from specnb.models.loading import load_pair
from specnb_audit.numerics import given_numerics
from studies.audit_power import false_alarms
from studies.audit_power.false_alarms import (
    CONTROLS,
    MIXED,
    NOT_EXACT,
    ExactEngine,
    controls,
    exact_engine,
    gather,
    items,
    measure,
    resampled,
    run_audits,
)
from studies.engines import engines


def engine_of(rows: int, n: int) -> ExactEngine:
    made = [replace(sample_row(*tables(seed), n, seed), steps=None) for seed in range(rows)]
    return ExactEngine(made, [row.p for row in made], [row.p.log() for row in made], Sampling())


def test_exact_samplers_stay_below_what_ville_allows() -> None:
    """The bets of 40 audits, at rates where alarms are allowed: ever reaching 10 has a chance of at most 0.1."""
    found = run_audits(engine_of(2, 100), range(40), progress=False).assign(setting="coins")
    counted = gather(found)
    ever = found.log10_e_peak
    assert counted.alarms[counted.setting == "coins"].tolist() == [int((ever >= level).sum()) for level in (1, 2, 3, 6)]
    assert (counted.alarms <= [11, 4, 2, 0] * 2).all()
    assert counted.audits.eq(40).all()
    assert counted.tokens.eq(40 * 200).all()
    assert len(set(ever)) > 1


def test_tokens_are_resampled_from_the_same_distributions() -> None:
    engine = engine_of(1, 2000)
    one, again, other = (resampled(engine, seed, 0) for seed in (0, 0, 1))
    assert one.tokens == again.tokens != other.tokens
    p = engine.rows[0].p
    assert one.p is p
    hits = np.mean([resampled(engine, seed, 0).tokens for seed in range(20)] == np.asarray(p.argmax(dim=-1)))
    assert hits == pytest.approx(float(p.amax(dim=-1).mean()), abs=0.02)


def test_an_engine_that_is_not_exact_is_rejected() -> None:
    engine = engine_of(2, 500)
    wrong = engine._replace(probs=[torch.softmax(2 * probs.log(), dim=-1) for probs in engine.probs])
    found = run_audits(wrong, range(3), progress=False)
    assert found.rejected_at.eq(1e-6).all()
    assert gather(found.assign(setting="wrong")).alarms.eq(3).all()


def test_a_token_that_rounding_keeps_is_explained_by_numerics_as_large() -> None:
    """One of three tokens is kept by the engine only; its logit is 0.1 below the weakest that the audit keeps."""
    engine = engine_of(1, 100)
    sampling = Sampling(top_k=2)
    logits = torch.tensor([[0.2, 0.1, 0.0]]).expand(100, 3)
    p = torch.tensor([[0.6, 0.4, 0.0]]).expand(100, 3)
    row = replace(engine.rows[0], tokens=[0] * 100, p=p, q=p, raw=None)
    rounded = ExactEngine([row], [p.flip(-1)], [logits], sampling)
    assert run_audits(rounded, range(2), progress=False).log10_e_peak.eq(np.inf).all()
    explained = rounded._replace(numerics=given_numerics(1.0, sampling))
    assert resampled(explained, 0, 0).cutoff_gaps.keys()
    assert np.isfinite(run_audits(explained, range(2), progress=False).log10_e_peak).all()


def test_every_setting_has_its_items() -> None:
    blocks = [f"{name}-0000{first}" for name in MIXED for first in (0, 2)]
    assert items(audits=4, block=2) == blocks + controls()


def test_engines_without_speculation_are_audited_in_parts() -> None:
    """Those whose sampler is known to be wrong are left out; the last part may be shorter."""
    assert "llamacpp-none-t0" in controls()
    assert set(NOT_EXACT) < set(engines.rows())
    assert not {*NOT_EXACT, "vllm-draft-t1"} & set(controls())
    found = measure("llamacpp-none-t0", audits=2, block=1, tokens=1300)  # 32 completions of at most 64 tokens
    assert found.setting.eq(CONTROLS).all()
    assert found.seed.tolist() == [0, 1]
    assert found.tokens.iloc[0] > found.tokens.iloc[1] > 0
    assert found.tokens.sum() == engines.audited(engines.rows()["llamacpp-none-t0"]).tokens
    assert measure("llamacpp-none-t0", audits=1, block=1, tokens=1300).tokens.tolist() == found.tokens.tolist()[:1]


@pytest.mark.parametrize("name", MIXED)
def test_the_trained_pair_is_a_nearly_exact_engine_in_every_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = MIXED[name]
    monkeypatch.setattr(false_alarms, "LENGTH", 50)
    engine = exact_engine(load_pair(packed=False), setting, tokens=100)
    assert [len(row.tokens) for row in engine.rows] == [50, 50]
    apart = max(
        float((row.p - probs).abs().sum(-1).max()) / 2 for row, probs in zip(engine.rows, engine.probs, strict=True)
    )
    assert apart == 0 if setting.dtype == torch.float32 else 1e-4 < apart < 0.5
    assert engine.numerics is not None
    assert run_audits(engine, [0], progress=False).tokens.tolist() == [100]
