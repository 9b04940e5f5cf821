"""Planted bugs of speculative beam search: rules that go down the tree in a wrong way.

The reference is the search without drafts, which is compared with transformers on its own.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from specnb.sampling import beam_rules
from specnb.sampling.beam_rules import Rule, advance


def planted(**wrong) -> Rule:
    """`advance` with other functions in place of those that it calls."""

    def rule(state, log_p, settings):
        with patch.multiple(beam_rules, **wrong):
            return advance(state, log_p, settings)

    return rule


def one_may_be_missing(state, log_p, settings):
    """A level is accepted with w - 1 of the beams inside the tree; the one outside is dropped."""
    states = []
    while not state.ended:
        inside = [i for i, path in enumerate(state.paths) if path in log_p]
        if len(inside) < max(1, len(state.paths) - 1):
            break
        kept = state._replace(paths=tuple(state.paths[i] for i in inside), scores=state.scores[inside])
        state = beam_rules.extend(kept, torch.stack([log_p[path] for path in kept.paths]), settings)
        states.append(state)
    return states


def wrong_parents(state, log_p, settings):
    """Children keep their scores and tokens, and hang below the next beam."""
    right = beam_rules.best

    def best(totals, count):
        parents, tokens, scores = right(totals, count)
        return [(parent + 1) % len(totals) for parent in parents], tokens, scores

    return planted(best=best)(state, log_p, settings)


def scores_not_reordered(state, log_p, settings):
    """Scores stay where they were while their beams change places."""
    right = beam_rules.best

    def best(totals, count):
        parents, tokens, scores = right(totals, count)
        return parents, tokens, scores.roll(1)

    return planted(best=best)(state, log_p, settings)


def one_level_off(state, log_p, settings):
    """Below the first level a node is given its parent's distribution."""
    shifted = {path: log_p.get(path[:-1], probs) if path not in state.paths else probs for path, probs in log_p.items()}
    return advance(state, shifted, settings)


def past_the_end(state, log_p, settings):
    """The search goes on down the tree after it is over."""
    return planted(is_over=lambda *given: False)(state, log_p, settings)


def ties_the_other_way(state, log_p, settings):
    """Of equal scores the later parent and the higher token come first."""

    def best(totals, count):
        flat = totals.flatten()
        at = flat.flip(0).argsort(descending=True, stable=True)[:count]
        at = len(flat) - 1 - at
        return (at // totals.shape[1]).tolist(), (at % totals.shape[1]).tolist(), flat[at]

    return planted(best=best)(state, log_p, settings)


def without_length_penalty(state, log_p, settings):
    """Beams that end inside the tree are not divided by their length."""
    return advance(state, log_p, replace(settings, length_penalty=0.0))


def end_inside(state, log_p, settings):
    """An end-of-text inside the tree is not noticed."""
    return advance(state, log_p, replace(settings, eos=()))


BEAM_BUGS: dict[str, Rule] = {
    "one-may-be-missing": one_may_be_missing,
    "wrong-parents": wrong_parents,
    "scores-not-reordered": scores_not_reordered,
    "one-level-off": one_level_off,
    "past-the-end": past_the_end,
    "ties-the-other-way": ties_the_other_way,
    "without-length-penalty": without_length_penalty,
    "end-inside": end_inside,
}
