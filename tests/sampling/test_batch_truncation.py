"""What neighbours do to a row's law, by enumeration: which ways to stay equally long are exact."""

import numpy as np
import pytest
import torch
from tiny import gpt2, laws_after, llama, near_copy

from specnb import cuts, theory
from specnb.decode import generate
from specnb.exact import completed, count_law, joint_law, step_law
from specnb.verify import exact_match, rejection_sampling, token_verification

EXACT = [cuts.each_its_own, cuts.at_the_shortest]
WRONG = [cuts.redrawn_at_the_shortest, cuts.short_of_the_longest]


def laws(make, prompt, length, noise=0.5):
    target = make(vocab=3)
    return laws_after(target, prompt, length), laws_after(near_copy(target, noise), prompt, length)


def distance(cut, gamma, make=llama):
    p, q = laws(make, [1], gamma + 1)
    others = cuts.tokens_law(*laws(make, [2, 0], gamma + 1), gamma)
    emitted = cuts.law_beside(cut, p, q, gamma, others)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    return float((completed(emitted, p, gamma + 1) - joint_law(p, gamma + 1)).abs().sum() / 2)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("cut", EXACT)
def test_exact_cuts_keep_the_law_of_every_row(cut, make, gamma):
    assert distance(cut, gamma, make) < 1e-12


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_redrawing_where_a_draft_was_accepted_is_not_exact(make, gamma):
    assert distance(cuts.redrawn_at_the_shortest, gamma, make) > 0.01


@pytest.mark.parametrize("gamma", [2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_dropping_only_what_a_row_lacks_of_the_longest_is_not_exact(make, gamma):
    assert distance(cuts.short_of_the_longest, gamma, make) > 0.05


@pytest.mark.parametrize("rule", [token_verification, exact_match, rejection_sampling])
def test_the_redrawn_token_is_biased_towards_the_correction(rule):
    """The deviation of one draft's law, derived: P(the other rejects) (1 - beta) (correction - p)."""
    p, q = (torch.tensor(law, dtype=torch.float64) for law in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    others = torch.tensor([0.4, 0.6], dtype=torch.float64)
    steps = [step_law(cuts.beside(cuts.redrawn_at_the_shortest, n, rule), lambda _: p, lambda _: q, 1) for n in (0, 1)]
    first = torch.zeros(3, dtype=torch.float64)
    for chance, emitted in zip(others.tolist(), steps, strict=True):
        for tokens, share in emitted.items():
            first[tokens[0]] += chance * share
    plain = step_law(rule, lambda _: p, lambda _: q, 1)
    rejected = torch.tensor([plain.get((x,), 0.0) for x in range(3)], dtype=torch.float64)
    assert torch.allclose(first - p, others[0] * (rejected - rejected.sum() * p), rtol=0, atol=1e-12)


def test_cut_rows_stay_independent_of_each_other():
    """Not only each row's law: the joint law of both is the product."""
    gamma, length = 2, 3
    worlds = [laws(llama, prompt, length) for prompt in ([1], [2, 0])]
    steps = [step_law(token_verification, p, q, gamma) for p, q in worlds]
    joint = torch.zeros((27, 27), dtype=torch.float64)
    texts = {}

    def rest(row, tokens):
        key = (row, tokens)
        if key not in texts:
            texts[key] = completed({tokens: 1.0}, worlds[row][0], length).flatten()
        return texts[key]

    for mine, chance in steps[0].items():
        for other, also in steps[1].items():
            end = min(len(mine), len(other))
            joint += chance * also * torch.outer(rest(0, mine[:end]), rest(1, other[:end]))
    target = [joint_law(p, length).flatten() for p, _ in worlds]
    assert float((joint - torch.outer(*target)).abs().sum()) < 1e-12


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_tokens_of_a_batch_cut_at_its_shortest_row(alpha, rows):
    """With iid acceptance every draft survives if all rows accept it: Equation 1 with alpha to the power of rows."""
    counts = torch.from_numpy(theory.count_law(alpha, 4))
    shortest = cuts.shortest_law(counts, rows)
    assert shortest.sum() == pytest.approx(1)
    mean = float(shortest @ torch.arange(1, 6, dtype=torch.float64))
    assert mean == pytest.approx(float(theory.expected_tokens(alpha**rows, 4)))


def test_the_shortest_of_several_rows_by_counting():
    counts = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    expected = np.zeros(3)
    for index in np.ndindex(3, 3, 3):
        expected[min(index)] += float(counts[list(index)].prod())
    assert cuts.shortest_law(counts, 3).numpy() == pytest.approx(expected)


@pytest.mark.parametrize("cut", [*EXACT, *WRONG])
def test_cuts_run_in_the_real_loop_as_enumerated(cut):
    """A rule of the loop sees the whole batch; two rows of it are each other's neighbour."""
    target = llama(dtype=torch.float64)
    draft = near_copy(target, noise=0.5)
    kept = []

    def rule(p, q, drafts, accept, final):
        outcome = token_verification(p, q, drafts, accept, final)
        made = cut(outcome, outcome.accepted.flip(0), p, drafts, final)
        kept.append((outcome.accepted.tolist(), made.accepted.tolist()))
        return made

    generate(target, [[1], [2, 0]], draft, gamma=3, max_new_tokens=8, rule=rule, progress=False)
    expected = {
        "each_its_own": lambda pair: pair,
        "at_the_shortest": lambda pair: [min(pair)] * 2,
        "redrawn_at_the_shortest": lambda pair: [min(pair)] * 2,
        "short_of_the_longest": lambda pair: [3 - max(pair) + n for n in pair],
    }[cut.__name__]
    assert kept
    assert all(made == expected(accepted) for accepted, made in kept)


def test_the_law_of_counts_is_that_of_the_rule():
    p, q = laws(gpt2, [1], 3)
    assert torch.equal(cuts.tokens_law(p, q, 2), count_law(step_law(token_verification, p, q, 2), 2))
