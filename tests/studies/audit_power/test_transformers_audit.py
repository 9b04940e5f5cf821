"""transformers' own loops on a tiny model: they run as called, and their exact samplers are not rejected."""

import pytest
from tiny import llama, near_copy, without_tokenizer

from specnb.distributions import Sampling
from specnb.models.loading import Pair
from studies.audit_power import transformers_audit
from studies.audit_power.transformers_audit import SAMPLERS, Sampler, audited, line, written


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    target = llama()
    monkeypatch.setattr(transformers_audit, "prompts_of", lambda pair: [[0, 1, 2], [1, 2, 3], [3, 0, 0]])
    return without_tokenizer(target, near_copy(target, noise=0.3))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_every_sampler_writes_as_much_as_was_asked(pair: Pair, sampler: Sampler) -> None:
    completions = written(sampler, Sampling(0.7, top_k=2), pair, [[0, 1, 2]] * 2, 8, seed=1)
    assert [len(text) for text in completions] == [8, 8]


def test_plain_sampling_is_not_rejected(pair: Pair) -> None:
    report = audited(SAMPLERS[1], Sampling(), pair, completions=16, new_tokens=12)
    found = line(SAMPLERS[1], "none", report)
    assert found["verdict"] == "not rejected"
    assert found["tokens"] == 16 * 12
    assert found["transformers"].startswith("5.")
