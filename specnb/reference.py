"""Algorithm 1 of the paper for one row, line by line: the reference that tests compare with.

It has no cache, batch or models, only functions from tokens to probabilities. With
`fractions.Fraction` its results are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

Number = Fraction | float
Model = Callable[[list[int]], list[Number]]  # from the tokens so far to the probabilities of the next one


def speculative_decoding_step(
    target: Model,
    draft: Model,
    prefix: list[int],
    gamma: int,
    draft_uniforms: Sequence[Number],
    accept_uniforms: Sequence[Number],
    final_uniform: Number,
) -> list[int]:
    """`prefix` and the tokens that one step emits; the comments are the lines of Algorithm 1.

    >>> half = Fraction(1, 2)
    >>> speculative_decoding_step(lambda _: [0, 1], lambda _: [half, half], [], 2, [0.1, 0.1], [0.4, 0.4], 0.3)
    [1]
    """
    # Sample gamma guesses x_1, ..., x_gamma from M_q autoregressively.
    q: list[list[Number]] = []
    x: list[int] = []
    for i in range(gamma):
        # q_i(x) <- M_q(prefix + [x_1, ..., x_{i-1}])
        q.append(draft(prefix + x))
        # x_i ~ q_i(x)
        x.append(sample(q[i], draft_uniforms[i]))

    # Run M_p in parallel: p_1(x), ..., p_{gamma+1}(x) <- M_p(prefix), ..., M_p(prefix + [x_1, ..., x_gamma])
    p = [target(prefix + x[:i]) for i in range(gamma + 1)]

    # Determine the number of accepted guesses n: r_1 ~ U(0, 1), ..., r_gamma ~ U(0, 1)
    r = accept_uniforms
    # n <- min({i - 1 | 1 <= i <= gamma, r_i > p_i(x) / q_i(x)} u {gamma})
    n = min([i for i in range(gamma) if r[i] > p[i][x[i]] / q[i][x[i]]] + [gamma])

    # Adjust the distribution from M_p if needed: p'(x) <- p_{n+1}(x)
    adjusted = p[n]
    # if n < gamma then p'(x) <- norm(max(0, p_{n+1}(x) - q_{n+1}(x)))
    if n < gamma:
        adjusted = norm([max(0, p_x - q_x) for p_x, q_x in zip(p[n], q[n], strict=True)])

    # Return one token from M_p, and n tokens from M_q: t ~ p'(x), return prefix + [x_1, ..., x_n, t]
    t = sample(adjusted, final_uniform)
    return [*prefix, *x[:n], t]


def norm(mass: list[Number]) -> list[Number]:
    total = sum(mass)
    return [m / total for m in mass]


def sample(probs: list[Number], uniform: Number) -> int:
    cumulated: Number = 0
    for token, probability in enumerate(probs):
        cumulated += probability
        if uniform < cumulated:
            return token
    raise ValueError(f"the distribution {probs} sums to {cumulated}, and the uniform {uniform} is not below that")
