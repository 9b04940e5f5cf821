"""The acceptance rule against the transcription of Algorithm 1, for the same uniforms."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specnb.distributions import sample
from specnb.reference import Number, speculative_decoding_step
from specnb.rules import token_verification

Step = tuple[list[list[Number]], list[list[Number]], list[Number]]


def weights(vocab: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=vocab, max_size=vocab).filter(any)


def normalised(weights: list[int]) -> list[Number]:
    return [Fraction(weight, sum(weights)) for weight in weights]


@st.composite
def steps(draw_example: st.DrawFn) -> Step:
    """p and q at each position, and uniforms: fractions whose denominators never let an edge be
    hit."""
    vocab, gamma = draw_example(st.integers(1, 5)), draw_example(st.integers(0, 3))
    p = [normalised(draw_example(weights(vocab))) for _ in range(gamma + 1)]
    q = [normalised(draw_example(weights(vocab))) for _ in range(gamma)]
    ticks = [draw_example(st.integers(0, 2**20 - 1)) for _ in range(2 * gamma + 1)]
    return p, q, [Fraction(2 * tick + 1, 2**21) for tick in ticks]


@given(steps())
@examples
def test_token_verification_agrees_with_the_reference_for_equal_uniforms(step: Step) -> None:
    p, q, uniforms = step
    gamma = len(q)
    draft_uniforms, accept, final = uniforms[:gamma], uniforms[gamma:-1], uniforms[-1]
    want = speculative_decoding_step(
        lambda prefix: p[len(prefix)], lambda prefix: q[len(prefix)], [], gamma, draft_uniforms, accept, final
    )

    def tensor(rows: Sequence[Sequence[Number]], *shape: int) -> Tensor:
        flat = [float(x) for row in rows for x in row]
        return torch.tensor(flat, dtype=torch.float64).reshape(shape)

    vocab = len(p[0])
    q_distributions, p_distributions = tensor(q, gamma, vocab), tensor(p, gamma + 1, vocab)
    draft_tokens = sample(q_distributions, tensor([draft_uniforms], gamma))
    outcome = token_verification(
        p_distributions, q_distributions, draft_tokens, tensor([accept], gamma), tensor([[final]])
    )
    assert [*draft_tokens[: outcome.accepted].tolist(), int(outcome.token)] == want


def test_where_the_rule_is_stricter_than_the_paper_as_printed() -> None:
    """Rejecting only when r > p/q lets r = 0 accept a token of probability zero: a uniform can be
    exactly 0."""
    p: list[list[Number]] = [[0.0, 1.0]] * 2
    q: list[list[Number]] = [[1.0, 0.0]]
    printed = speculative_decoding_step(lambda _: p[0], lambda _: q[0], [], 1, [0.0], [0.0], 0.0)
    assert printed == [0, 1]
    zero = torch.zeros(1, dtype=torch.float64)
    outcome = token_verification(torch.tensor(p), torch.tensor(q), torch.tensor([0]), zero, zero[0])
    assert (int(outcome.accepted), int(outcome.token)) == (0, 1)


def test_the_models_are_asked_after_the_prefix_and_the_guesses_so_far() -> None:
    """Guesses 0 and 1 after the prefix 5, 6; the last is rejected, and the recovered token is 2."""
    asked: dict[str, list[list[int]]] = {"target": [], "draft": []}
    third = Fraction(1, 3)

    def target(prefix: list[int]) -> list[Number]:
        asked["target"].append(list(prefix))
        return [third, Fraction(0), 1 - third]

    def draft(prefix: list[int]) -> list[Number]:
        asked["draft"].append(list(prefix))
        return [third] * 3

    made = speculative_decoding_step(target, draft, [5, 6], 2, [Fraction(0), third], [0.5, 0.5], Fraction(1, 2))
    assert made == [5, 6, 0, 2]
    assert asked == {"target": [[5, 6], [5, 6, 0], [5, 6, 0, 1]], "draft": [[5, 6], [5, 6, 0]]}
