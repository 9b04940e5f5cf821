"""The "more elaborate procedure" of appendix A.4, which may keep other beams than beam search."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specnb.beam import Beams, BeamSettings, Path, extend


def advance_pooled(state: Beams, log_p: Mapping[Path, Tensor], settings: BeamSettings) -> list[Beams]:
    """The "more elaborate procedure" of A.4: the target may continue every node of the tree, not only its own beams.

    A candidate above the target's own best descends from a node that the target's search dropped and the wider draft
    search kept. Each level scores at least what `advance` gives from the same beams, but the result is not that of
    beam search.

    >>> from specnb.beam import start
    >>> log_p = {(): torch.tensor([0.45, 0.55]).log(), (0,): torch.tensor([0.9, 0.1]).log()}
    >>> log_p[(1,)] = torch.tensor([0.5, 0.5]).log()
    >>> [state.paths for state in advance_pooled(start(), log_p, BeamSettings(width=1, max_new_tokens=8))]
    [((1,),), ((0, 0),)]
    """
    scores = dict(zip(state.paths, state.scores, strict=True))
    for path in sorted(log_p.keys() - scores.keys(), key=lambda path: (len(path), path)):
        scores[path] = scores[path[:-1]] + log_p[path[:-1]][path[-1]]
    states: list[Beams] = []
    while not state.ended and all(path in log_p for path in state.paths):
        others = {path for path in scores if len(path) == len(state.paths[0])} - set(state.paths)
        pool = [*state.paths, *sorted(others, key=lambda path: (-float(scores[path]), path))]
        wider = state._replace(paths=tuple(pool), scores=torch.stack([scores[path] for path in pool]))
        state = extend(wider, torch.stack([log_p[path] for path in pool]), settings)
        states.append(state)
    return states
