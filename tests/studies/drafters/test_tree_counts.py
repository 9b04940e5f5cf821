"""Trees of a head, counted along answers: against every path of a tiny model, and against the
loop; and what is chosen by their speed."""

from __future__ import annotations

from itertools import product, takewhile
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from drafter_kinds import VOCAB, attending, eagle3, near_model, next_token

from specnb.acceptance import measure_acceptance
from specnb.distributions import Sampling
from specnb.drafters import Context
from specnb.heads import AttentionDrafter
from specnb.sampler import generate
from studies.drafters import tree_counts
from studies.drafters.tree_counts import CHAIN, DYNAMIC, FIXED, SAMPLED, Costs, Draft, Setting, along, drafts, rate_of

NODES = 3
PROMPTS = [[1, 2, 3], [3, 0], [2, 2, 1]]


def setting(drafter: AttentionDrafter) -> Setting:
    return Setting(near_model("llama"), drafter, PROMPTS, PROMPTS)


@pytest.mark.parametrize(("drafter", "nodes"), [(attending(), 3), (next_token(), 3), (eagle3(), 2)])
@torch.no_grad()
def test_the_largest_products_are_those_of_all_paths(
    drafter: AttentionDrafter, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deep as there are nodes; the last head proposes three of the four tokens."""
    monkeypatch.setattr(tree_counts, "DEPTH", nodes)
    of, answer = setting(drafter), [0, 3, 1, 1, 2]
    found = along(of, PROMPTS[0], answer, Sampling(), nodes)
    proposed = set(range(VOCAB) if drafter.proposed is None else drafter.proposed.tolist())
    tokens = torch.tensor([[*PROMPTS[0], *answer, 0, 0, 0, 0]])
    states = of.target(tokens, output_hidden_states=True).hidden_states
    context = Context(tokens, torch.tensor([0]), torch.cat([states[layer] for layer in drafter.hidden_layers], dim=-1))
    for place in range(len(answer)):
        context = context._replace(lengths=torch.tensor([len(PROMPTS[0]) + place]))
        products: dict[tuple[int, ...], float] = {}
        for path in product(range(VOCAB), repeat=nodes):
            drafter.start(context)
            q = drafter.along(context, torch.tensor([path]))[0]
            each = q.gather(1, torch.tensor(path)[:, None])[:, 0].cumprod(dim=0)
            products |= {path[: depth + 1]: float(each[depth]) for depth in range(nodes)}
        for depth in range(1, nodes + 1):
            expected = sorted((one for path, one in products.items() if len(path) <= depth), reverse=True)
            largest = found.values[place, depth - 1]  # noqa: PD011
            assert largest.tolist() == pytest.approx(expected[: nodes + 1], abs=1e-5), (place, depth)
            following = tuple(answer[place : place + depth])
            inside = [products[following[:n]] >= expected[nodes - 1] for n in range(1, len(following) + 1)]
            assert tree_counts.accepted(found, Draft(DYNAMIC, nodes, depth))[place] == sum(inside)
        next_ones = tuple(answer[place : place + nodes])
        own = found.probability[place, : len(next_ones)].cumprod(dim=0)
        assert own.tolist() == pytest.approx([products[next_ones[: at + 1]] for at in range(len(next_ones))], abs=1e-5)
        assert len(tree_counts.ranks_of(found)[place]) == len([*takewhile(proposed.__contains__, next_ones)])


def test_a_chain_is_counted_as_in_the_loop() -> None:
    """At temperature 0 exactly, where steps are not cut off; above it in expectation, as acceptance
    is."""
    drafter, greedy = attending(), Sampling(0)
    of, how = setting(drafter), dict[str, Any](max_new_tokens=12, progress=False)
    drafter.sampling = greedy
    made = generate(of.target, PROMPTS, drafter, gamma=2, sampling=greedy, **how)
    drafter.sampling = Sampling()
    answers = [along(of, *each, greedy, 2) for each in zip(PROMPTS, made.tokens, strict=True)]
    for row, answer in zip(made.record.accepted, answers, strict=True):
        taken = tree_counts.accepted(answer, Draft(CHAIN, 2, 2, frozenset({(1,), (1, 1)})))
        place = 0
        for accepted in row:
            if place < 12 - 2:
                assert taken[place] == accepted
                place += accepted + 1
    texts = generate(of.target, PROMPTS * 3, None, **how).tokens
    measured = measure_acceptance(of.target, PROMPTS * 3, drafter, completions=texts, gamma=2)
    found = [along(of, *each, Sampling(), 2) for each in zip(PROMPTS * 3, texts, strict=True)]
    rate = rate_of(found, Draft(SAMPLED, 2, 2), 2)(np.arange(len(found)))
    assert rate == pytest.approx(measured.by_depth().tokens_per_step.value, abs=1e-5)


def answers_of(drafter: AttentionDrafter) -> list[tree_counts.Along]:
    of = setting(drafter)
    texts = generate(of.target, PROMPTS * 3, None, max_new_tokens=12, progress=False).tokens
    return [along(of, *each, Sampling(), NODES) for each in zip(PROMPTS * 3, texts, strict=True)]


def test_a_fixed_tree_has_the_most_frequent_ranks_and_never_less_than_the_chain_on_its_own_answers() -> None:
    answers = answers_of(attending())
    every = {draft[:3]: draft for draft in drafts(answers, (2, NODES), Sampling())}
    for count in (2, NODES):
        trees = [every[FIXED, count, depth].tree for depth in range(1, count + 1)]
        for depth, tree in enumerate(trees, 1):
            assert len(tree) == count
            assert all(len(path) <= depth and (path[:-1] in tree or len(path) == 1) for path in tree)
    assert every[FIXED, 2, 2].tree < every[FIXED, NODES, NODES].tree
    of_tree, of_chain = (
        sum(tree_counts.accepted(one, every[kind, NODES, NODES]).sum() for one in answers) for kind in (FIXED, CHAIN)
    )
    assert of_tree >= of_chain


def test_speeds_are_over_costs_and_depths_are_chosen_on_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is flat where a pass of the head costs as much as one of the target."""
    costs = {"free": Costs(0.0, lambda n: 1.0), "dear": Costs(1.0, lambda n: 1 + n / 10)}
    monkeypatch.setattr(tree_counts, "costs_of", lambda _: costs)
    other, nodes = answers_of(attending()), (2, NODES)
    lines = pd.DataFrame(tree_counts.compared("model-1", other, other[:5], nodes))
    tokens = {one[:3]: rate_of(other, one, NODES)(np.arange(9)) for one in drafts(other, nodes, Sampling())}
    for (machine, kind), rows in lines.groupby(["machine", "kind"]):
        (c, v), speeds = costs[str(machine)], []
        for row in rows.itertuples():
            assert row.cost == row.passes * c + v(row.nodes + 1)
            depths = range(1, row.nodes + 1) if "tree" in row.kind else [row.nodes]
            of_depth = {depth: tokens[kind, row.nodes, depth] / (depth * c + v(row.nodes + 1)) for depth in depths}
            speeds.append(of_depth[row.passes])
            assert speeds[-1] == max(of_depth.values())
            assert machine == "free" or "chain" in row.kind or row.passes == 1
        assert rows.best.tolist() == [speed == max(speeds) for speed in speeds]
    assert lines.speed_up.to_numpy() == pytest.approx((lines.tokens_per_step / lines.cost).to_numpy())
    for over, kinds in (("over_chain", (CHAIN, SAMPLED)), ("over_fixed", (FIXED,))):
        for _, rows in lines.groupby("machine"):
            ones = rows[rows.best & rows.kind.isin(kinds)][over]
            assert (ones == 1).sum() == 1
            assert rows[over].to_numpy() * (rows.speed_up / rows[over]).iloc[0] == pytest.approx(
                rows.speed_up.to_numpy()
            )
        assert ((lines[f"{over}_low"] <= lines[over]) & (lines[over] <= lines[f"{over}_high"])).all()


def test_costs_come_from_what_was_timed() -> None:
    for model, machines in {"pair": ("CPU",), "smollm2": ("CPU", "H200")}.items():
        for machine in machines:
            c, v = tree_counts.costs_of(model)[machine]
            assert 0 < c < 1
            assert v(1) == 1 < v(5) < v(17) < 3
