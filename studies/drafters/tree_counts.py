"""How many tokens does a step emit if a head drafts a tree instead of a chain?

Counted outside the loop, along answers of the target: at every place of an answer the head is given
the answer's own tokens, and a tree of which it is known which nodes are the answer's next tokens
has accepted those. Steps follow each other as in the loop. Trees of equally many nodes:

    chain           each token is the head's most probable one
    sampled chain   each token is sampled, above temperature 0 what the loop does
    fixed tree      the same ranks in every step: rank 2 after rank 1 is the second most probable
                    token after the most probable one. The ranks that other answers had most often
    dynamic tree    as in EAGLE-2 (arXiv:2406.16858) the nodes whose product of the head's
                    probabilities, from the root on, is largest, down to depth `DEPTH`

Children are the head's most probable tokens and are not sampled, so the tree depends on the prefix
alone, and a node is accepted with the target's probability of its token: a rule that is exact
accepts as many.

One line of the table for each model, temperature, kind of tree and number of nodes:
`tokens_per_step`, the target's own token included, with a 95% interval over answers, and `tree`,
the ranks of a fixed tree's nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.acceptance import Acceptance
from specnb.distributions import Sampling, overlap, standardise
from specnb.heads import AttentionDrafter
from specnb.loading import TRAINED_PAIR, load_pair
from specnb.released import load_drafter
from specnb.sampler import generate
from specnb.statistics import Estimate, ratio_of_sums
from studies import corpus, study
from studies.training.chains import Branches, Chains, as_trained

DEPTH = 6  # of a dynamic tree
CHAIN, SAMPLED, FIXED, DYNAMIC = "chain", "sampled chain", "fixed tree", "dynamic tree"
Path = tuple[int, ...]


class Setting(NamedTuple):
    """A target, a head's drafter, and prompts: `other` ones for the choice of a fixed tree."""

    target: PreTrainedModel
    drafter: AttentionDrafter
    prompts: list[list[int]]
    other: list[list[int]]
    end: int | None = None


def shipped_pair(prompts: int, prompt_tokens: int) -> Setting:
    """Held-out files for counting, files of the training text for the choice of a tree."""
    pair = load_pair()
    held_out, other = (
        [pair.encode(text[: 20 * prompt_tokens])[:prompt_tokens] for text in corpus.read(split, limit=prompts)]
        for split in ("held-out", "train")
    )
    return Setting(pair.target, load_drafter(pair.target, TRAINED_PAIR / "draft-eagle3"), held_out, other)


SETTINGS: dict[str, Callable[[int, int], Setting]] = {"pair": shipped_pair}


class Along(NamedTuple):
    """What a head says along an answer: at each place `(places, depths)` the rank and the probability
    of the answer's next tokens; the overlap with p, min(1, q / p) and 1, as in `Acceptance.drafts`;
    and, if asked for, the largest products of probabilities of any nodes there `(places, most)`."""

    rank: Tensor
    probability: Tensor
    compared: Tensor
    values: Tensor | None


@torch.no_grad()
def along(
    setting: Setting, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, nodes: int, dynamic: bool = True
) -> Along:
    """What the head says along `answer`, for trees of at most `nodes` nodes."""
    target, drafter = setting.target, setting.drafter
    tokens, first = torch.tensor([[*prompt, *answer]], device=target.device), len(prompt) - 1
    found = target(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=True)
    p = standardise(found.logits[0], sampling)
    states = torch.cat([found.hidden_states[layer] for layer in drafter.hidden_layers], dim=-1).to(drafter.dtype)
    head, known = as_trained(drafter.head), tokens[:, :-1]
    parts = []
    for features, at in Chains(head, drafter.embedding, nodes)(known, states):
        following = tokens[0, at.start + 1 :]
        q, of_p = drafter.q(features[0]), p[at.start :]
        own, p_own = (one.gather(1, following[:, None])[:, 0] for one in (q, of_p))
        kept = (own / p_own).clamp_max(1).where(p_own > 0, 0.0)
        each = [(q > own[:, None]).sum(dim=-1).float(), own, overlap(of_p, q), kept, torch.ones_like(own)]
        # A draft begins after each token from the second on; those of the prompt are not measured.
        stacked = torch.stack(each, dim=-1)[first - 1 :]
        parts.append(pad(stacked, (0, 0, 0, len(answer) - len(stacked)), value=torch.nan))
    both = torch.stack(parts, dim=1)
    values = largest(drafter, head, known, states, first, nodes) if dynamic else None
    return Along(both[..., 0], both[..., 1], both[..., 2:], values)


@torch.no_grad()
def largest(drafter: AttentionDrafter, head: Any, tokens: Tensor, states: Tensor, first: int, nodes: int) -> Tensor:
    """The `nodes` largest products of q from the root of a tree on `(places, nodes)`, at each place of
    `tokens` `(1, n)` from `first` on. A node can be among them only if its parent is."""
    seen, slots = Branches(), torch.arange(tokens.shape[1], device=tokens.device)[None]
    state = pad(head.combined(states[:, :-1]), (0, 0, 1, 0))
    state = head.after(state, drafter.embedding(tokens), slots, seen, 0)[:, first:]
    places, width, found = state.shape[1], 1, []
    value = torch.ones(places, 1, device=tokens.device)
    for depth in range(1, DEPTH + 1):
        likely, children = drafter.q(head.features(state))[0].unflatten(0, (places, width)).topk(nodes)
        value, at = (value[..., None] * likely).flatten(1).topk(nodes)
        found.append(value)
        chosen, parents = children.flatten(1).gather(1, at), at // nodes
        seen.parents = (torch.arange(places, device=at.device)[:, None] * width + parents).flatten()
        entered, at_slots = state[:, seen.parents], (slots[0, first:, None] + depth).expand(-1, nodes)
        state = head.after(entered, drafter.embedding(chosen.view(1, -1)), at_slots.reshape(1, -1), seen, 0)
        width = nodes
    return torch.cat(found, dim=1).topk(nodes).values


def ranks_of(answers: Sequence[Along], depths: int) -> list[list[Path]]:
    """The ranks of the next tokens, from 1, at each place of each answer, to the end of the answer."""
    return [
        [tuple(int(rank) + 1 for rank in place[:depths].tolist() if rank == rank) for place in answer.rank]
        for answer in answers
    ]


def fixed_trees(answers: Sequence[Along], nodes: Sequence[int]) -> dict[int, set[Path]]:
    """For each number of nodes the ranks that the next tokens of `answers` had most often. Those of a
    parent are at least as frequent as those of its child."""
    counted: Counter[Path] = Counter()
    for places in ranks_of(answers, max(nodes)):
        counted.update(ranks[:depth] for ranks in places for depth in range(1, len(ranks) + 1))
    ordered = sorted(counted, key=lambda path: (-counted[path], len(path), path))
    return {count: set(ordered[:count]) for count in nodes}


def accepted(answer: Along, kind: str, nodes: int, tree: set[Path]) -> NDArray[np.int64]:
    """How many draft tokens a step accepts at each place."""
    if kind == DYNAMIC:
        assert answer.values is not None
        value = answer.probability[:, :DEPTH].nan_to_num(0).cumprod(dim=1)
        return (value >= answer.values[:, nodes - 1 : nodes]).sum(dim=1).cpu().numpy()
    inside = [[ranks[:depth] in tree for depth in range(1, len(ranks) + 1)] for ranks in ranks_of([answer], nodes)[0]]
    return np.array([next((at for at, one in enumerate(each) if not one), len(each)) for each in inside])


def counted(answers: Sequence[Along], kind: str, nodes: int, tree: set[Path], most: int) -> Estimate:
    """Tokens per step. Steps that begin within the last `most` places are not counted."""
    tokens, steps = [], []
    for answer in answers:
        taken, at, begun = accepted(answer, kind, nodes, tree), 0, 0
        while at < len(taken) - most:
            at, begun = at + int(taken[at]) + 1, begun + 1
        tokens.append(at)
        steps.append(begun)
    return ratio_of_sums(np.array(tokens), np.array(steps))


def sampled(answers: Sequence[Along], nodes: int) -> Estimate:
    """Tokens per step of a chain that is sampled, with token verification."""
    longest = max(len(answer.compared) for answer in answers)
    missing = (pad(one.compared, (0, 0, 0, 0, 0, longest - len(one.compared)), value=torch.nan) for one in answers)
    drafts = torch.stack(list(missing)).double().cpu().numpy()
    return Acceptance([[0]] * len(answers), {"draft": drafts}).by_depth(gamma=nodes).tokens_per_step


def measure(item: str, prompts: int, prompt_tokens: int, new_tokens: int, nodes: Sequence[int]) -> Iterator[Any]:
    """The lines of one model and temperature."""
    name, temperature = item.split("-")
    setting, sampling, most = SETTINGS[name](prompts, prompt_tokens), Sampling(float(temperature)), max(nodes)

    def answers(given: list[list[int]], dynamic: bool) -> list[Along]:
        ends = [] if setting.end is None else [setting.end]
        made = generate(
            setting.target, given, None, max_new_tokens=new_tokens, sampling=sampling, eos=ends, progress=False
        )
        pairs = [(prompt, answer) for prompt, answer in zip(given, made.tokens, strict=True) if len(answer) > most]
        return [along(setting, prompt, answer, sampling, most, dynamic) for prompt, answer in tqdm(pairs, desc=item)]

    trees, measured = fixed_trees(answers(setting.other, False), nodes), answers(setting.prompts, True)
    for count in nodes:
        chain = {(1,) * depth for depth in range(1, count + 1)}
        for kind, tree in ((CHAIN, chain), (FIXED, trees[count]), (DYNAMIC, set())):
            line = {"model": name, "temperature": sampling.temperature, "kind": kind, "nodes": count}
            shape = " ".join(".".join(map(str, path)) for path in sorted(tree)) if kind == FIXED else ""
            found = study.columns("tokens_per_step", counted(measured, kind, count, tree, most))
            yield line | found | {"answers": len(measured), "tree": shape}
        if sampling.temperature:
            found = study.columns("tokens_per_step", sampled(measured, count))
            yield line | {"kind": SAMPLED} | found | {"answers": len(measured), "tree": ""}


STUDY = study.Study(
    measure,
    settings={"prompts": 48, "prompt_tokens": 64, "new_tokens": 64, "nodes": (4, 6, 10, 16)},
    small={"prompts": 3, "prompt_tokens": 16, "new_tokens": 12, "nodes": (2, 4)},
    items=("pair-0", "pair-1"),
    small_items=("pair-1",),
)
