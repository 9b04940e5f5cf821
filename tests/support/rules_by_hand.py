"""The rules of `specnb.sampling` in plain Python, one row at a time, written from their definitions.

Distributions are lists of float64 numbers; a draft token -1 is none. They are slow, and share no code with the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from sys import float_info

Probs = Sequence[float]
Chain = tuple[list[float], list[list[float]]]  # `ChainPlan`: acceptance probabilities, unnormalised distributions
Selection = tuple[list[float], list[float]]  # `SelectionPlan`
LARGEST = float_info.max
Path = tuple[list[int], int]  # the accepted nodes of a tree, and the token that follows


def ratio(p: float, q: float) -> float:
    """p / q; 0 where the target never samples the token, infinite where only the drafter does not."""
    return p / q if q > 0 else inf if p > 0 else 0.0


def sampled(mass: Probs, uniform: float) -> int:
    """The first token at which the cumulated mass exceeds `uniform` times all of it."""
    return next(x for x in range(len(mass)) if sum(mass[: x + 1]) > uniform * sum(mass))


def scaled(mass: Probs) -> list[float]:
    return [x / sum(mass) for x in mass]


def left_of(p: Probs, q: Probs) -> list[float]:
    """norm(max(0, p - q)); norm(p) where nothing is left."""
    mass = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return scaled(mass if sum(mass) > 0 else p)


# Chains


def token_by_token(
    p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int], uniforms: Probs, final: float, lenience: float = 1.0
) -> tuple[int, int]:
    """Algorithm 1: the number of accepted draft tokens and the token that follows them."""
    for n, x in enumerate(tokens):
        if x < 0 or not lenience * uniforms[n] < min(1.0, ratio(p[n][x], q[n][x])):
            return n, sampled(left_of(p[n], q[n]), final)
    return len(tokens), sampled(p[len(tokens)], final)


def rejection(
    p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int], uniforms: Probs, final: float
) -> tuple[int, int]:
    """Appendix A.2, tried once at each position."""
    for n, x in enumerate(tokens):
        most = max(ratio(a, b) for a, b in zip(p[n], q[n], strict=True))  # M
        if x < 0 or not uniforms[n] < ratio(p[n][x], q[n][x]) / most:
            return n, sampled(p[n], final)
    return len(tokens), sampled(p[len(tokens)], final)


def matching(
    p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int], uniforms: Probs, final: float
) -> tuple[int, int]:
    """The target's own samples, as long as the draft tokens agree."""
    for n, x in enumerate(tokens):
        own = sampled(p[n], uniforms[n])
        if own != x:
            return n, own
    return len(tokens), sampled(p[len(tokens)], final)


def greedy(
    p: Sequence[Probs],
    q: Sequence[Probs],
    tokens: Sequence[int],
    uniforms: Probs,
    final: float,
    lenience: float = 1.0,
) -> tuple[int, int]:
    """The argmax, lowest token first; with a lenience any token that is nearly as probable is accepted."""
    for n, x in enumerate(tokens):
        best = list(p[n]).index(max(p[n]))
        if x != best and (x < 0 or not p[n][x] > lenience * max(p[n])):
            return n, best
    return len(tokens), list(p[len(tokens)]).index(max(p[len(tokens)]))


def block(p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int]) -> Chain:
    """Block verification, Algorithm 2 of Sun et al."""
    accept, recovered, weight = [], [], 1.0
    for n in range(len(tokens) + 1):
        if n:
            own = ratio(p[n - 1][tokens[n - 1]], q[n - 1][tokens[n - 1]]) if tokens[n - 1] >= 0 else 0.0
            weight = min(1.0, weight * own) if weight > 0 else 0.0
        last = n == len(tokens)
        mass = [max(0.0, weight * a - (0.0 if last else b)) for a, b in zip(p[n], p[n] if last else q[n], strict=True)]
        below = sum(mass) + 1 - weight
        accept.append(weight if last else sum(mass) / below if below > 0 else 1.0)
        recovered.append(mass if sum(mass) > 0 else list(p[n]))
    return accept[1:], recovered


def hierarchical(p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int], variant: str = "paper") -> Chain:
    """Hierarchical verification; `variant` "code" does not cap the last ratio, "file" also weighs p its own way."""
    ratios, drafted = [1.0], [1.0]
    for n, x in enumerate(tokens):
        own = min(ratio(p[n][x], q[n][x]), LARGEST) if x >= 0 else 0.0
        ratios.append(min(ratios[-1] * own, LARGEST))
        drafted.append(drafted[-1] * q[n][max(x, 0)])
    accept, recovered = [], []
    for n in range(len(tokens) + 1):
        most = max(1.0, *ratios[: n + 1])
        before = max(1.0, *ratios[:n]) if n else 1.0
        following = q[n] if n < len(tokens) else [0.0] * len(p[n])
        if variant == "file":
            new_maximum = n > 0 and most > before
            mine = [(drafted[n] if new_maximum else 1.0) * a for a in p[n]]
            theirs = [drafted[n] * b for b in following]
        else:
            mine, theirs = [ratios[n] / most * a for a in p[n]], list(following)
        forward = [max(0.0, a - b) for a, b in zip(mine, theirs, strict=True)]
        backward = [max(0.0, b - a) for a, b in zip(mine, theirs, strict=True)]
        if sum(theirs) == 0:
            accept.append(min(1.0, ratios[n] / before if variant == "paper" else ratios[n]))
        else:
            accept.append(min(1.0, sum(forward) / sum(backward)) if sum(backward) > 0 else 1.0)
        recovered.append(forward if sum(forward) > 0 else list(p[n]))
    return accept[1:], recovered


def longest(plan: Chain, uniforms: Probs, final: float) -> tuple[int, int]:
    """The longest prefix whose own uniform is below its acceptance probability, and the token after it."""
    passed = [n + 1 for n, (u, chance) in enumerate(zip(uniforms, plan[0], strict=True)) if u < chance]
    n = max(passed, default=0)
    return n, sampled(plan[1][n], final)


# Several draft tokens of one position


def recursive(p: Probs, q: Sequence[Probs], tokens: Sequence[int]) -> Selection:
    left, accept = list(p), []
    for own, x in zip(q, tokens, strict=True):
        accept.append(min(1.0, ratio(left[x], own[x])) if x >= 0 else 0.0)
        left = left_of(left, own) if x >= 0 else left
    return accept, left


def top_k(p: Probs, q: Sequence[Probs], tokens: Sequence[int]) -> Selection:
    """EAGLE's rule: accept x with r(x), else set r(x) to 0 and renormalise."""
    left, accept = list(p), []
    for x in tokens:
        accept.append(left[x] if x >= 0 else 0.0)
        if x >= 0 and left[x] < sum(left):
            left = scaled([0.0 if y == x else share for y, share in enumerate(left)])
    return accept, left


def k_sequential(p: Probs, q: Sequence[Probs], tokens: Sequence[int]) -> Selection:
    """SpecTr's rule; rho is found by bisection of its equation."""
    k, low, high = len(tokens), 1.0, float(len(tokens))

    def beta(rho: float) -> float:
        return sum(min(a / rho, b) for a, b in zip(p, q[0], strict=True))

    def served(rho: float) -> float:
        return 1 - (1 - min(1.0, beta(rho))) ** k

    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if served(middle) > middle * beta(middle) else (low, middle)
    accept = [min(1.0, ratio(p[x] / high, q[0][x])) for x in tokens]
    times = served(high) / beta(high) if beta(high) > 0 else 0.0
    left = [max(0.0, a - min(a / high, b) * times) for a, b in zip(p, q[0], strict=True)]
    return accept, left if sum(left) > 0 else list(p)


def spechub(p: Probs, q: Sequence[Probs], tokens: Sequence[int]) -> dict[int, float]:
    """How often SpecHub emits each draft token because of the pair `tokens`, from the flows of its definition."""
    own = list(q[0])
    hub = own.index(max(own))
    others = [x for x in range(len(own)) if x != hub]
    rest = sum(own[x] for x in others)
    first = {x: own[x] for x in others}  # Q(x, a)
    second = {x: own[hub] * own[x] / rest if rest > 0 else 0.0 for x in others}  # Q(a, x)
    taken_first = {x: min(p[x], first[x]) for x in others}
    taken_second = {x: min(p[x] - taken_first[x], second[x]) for x in others}
    spare_second = sum(second.values()) - sum(taken_second.values())
    spare_first = sum(first.values()) - sum(taken_first.values())
    hub_second = min(1.0, ratio(p[hub], spare_second)) if spare_second > 0 else 0.0
    hub_first = min(1.0, ratio(max(0.0, p[hub] - spare_second), spare_first)) if spare_first > 0 else 0.0
    if tokens[1] < 0:  # q is one-hot
        return {hub: p[hub]}
    if tokens[0] == hub:
        x, flows, taken, share = tokens[1], second, taken_second, hub_second
    else:
        x, flows, taken, share = tokens[0], first, taken_first, hub_first
    chosen = taken[x] / flows[x]
    return {x: chosen, hub: (1 - chosen) * share}


# Trees

SelectionByHand = Callable[[Probs, Sequence[Probs], Sequence[int]], Selection]


def children(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def selection_tree(
    plan: SelectionByHand, p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int], parents: Sequence[int],
    uniforms: Probs, final: float,
) -> Path:  # fmt: skip
    """From the root down: `plan` for the children of the last node accepted."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        below = children(parents, node)
        if not below:
            return path, sampled(p[node + 1], final)
        accept, left = plan(p[node + 1], [q[i] for i in below], [tokens[i] for i in below])
        chosen = [child for child, chance in zip(below, accept, strict=True) if uniforms[child] < chance]
        if not chosen:
            return path, sampled(left, final)
        path.append(chosen[0])


def traversal(
    p: Sequence[Probs], q: Sequence[Probs], tokens: Sequence[int], parents: Sequence[int], uniforms: Probs, final: float
) -> Path:
    """Traversal verification: the nodes from the leaves up, subtree after subtree."""

    def visit(node: int, weight: float) -> Path | None:
        left = list(p[node + 1])
        for child in children(parents, node):
            x = tokens[child]
            if x < 0:
                continue
            own = ratio(left[x], q[child][x])
            found = visit(child, min(1.0, weight * own) if weight > 0 else 0.0)
            if found is not None:
                return found[0] if node < 0 else [node, *found[0]], found[1]
            mass = [max(0.0, weight * a - b) for a, b in zip(left, q[child], strict=True)]
            below = sum(mass) + 1 - weight
            weight = sum(mass) / below if below > 0 else 1.0
            left = scaled(mass) if sum(mass) > 0 else left
        if node < 0:
            return [], sampled(left, final)
        return ([node], sampled(left, final)) if uniforms[node] < weight else None

    found = visit(-1, 1.0)
    assert found is not None
    return found


def following(choice: Callable[[int], int], tokens: Sequence[int], parents: Sequence[int]) -> Path:
    """The last child that has the token `choice(node)` of each node accepted, as long as there is one."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        wanted = choice(node)
        found = [child for child in children(parents, node) if tokens[child] == wanted]
        if not found:
            return path, wanted
        path.append(found[0])


def chosen_chain(
    p: Callable[[tuple[int, ...]], Probs], q: Callable[[tuple[int, ...]], Probs], chains: Sequence[tuple[int, ...]]
) -> tuple[int, list[list[float]]]:
    """Which of k chains is preferred by p/q at each token, and how its tokens are distributed, by enumeration.

    The distributions `(depth, vocab)` are those of the preferred one of k independent chains from q, along this chain.
    """
    depth, vocab = len(chains[0]), len(q(()))

    def place(chain: tuple[int, ...]) -> tuple[int, ...]:
        """The place of each token in the order of decreasing p/q after its prefix, lower tokens first among equals."""
        places = []
        for n in range(depth):
            before_p, before_q = p(chain[:n]), q(chain[:n])
            order = sorted(range(vocab), key=lambda x: (-ratio(before_p[x], before_q[x]), x))
            places.append(order.index(chain[n]))
        return tuple(places)

    every = list(product(range(vocab), repeat=depth))
    chance = dict.fromkeys(every, 1.0)
    for chain in every:
        for n in range(depth):
            chance[chain] *= q(chain[:n])[chain[n]]
    ranked = sorted(every, key=place)
    behind = {chain: sum(chance[other] for other in ranked[at + 1 :]) for at, chain in enumerate(ranked)}
    k = len(chains)
    preferred = {chain: (behind[chain] + chance[chain]) ** k - behind[chain] ** k for chain in every}
    best = min(range(k), key=lambda i: (place(chains[i]), i))
    rows = []
    for n in range(depth):
        prefix = chains[best][:n]
        mass = [
            sum(share for chain, share in preferred.items() if chain[: n + 1] == (*prefix, x)) for x in range(vocab)
        ]
        rows.append(scaled(mass))
    return best, rows
