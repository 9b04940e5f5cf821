"""How many tokens does a step emit, and how fast is it, if a head drafts a tree instead of a chain?

Counted outside the loop, along answers of the target: at every place of an answer the head is given
the answer's own tokens, and a tree of which it is known which nodes are the answer's next tokens
has accepted those. Steps follow each other as in the loop. Trees of equally many nodes:

    chain           each token is the head's most probable one
    sampled chain   each token is sampled, above temperature 0 what the loop does
    fixed tree      the same ranks in every step: rank 2 after rank 1 is the second most probable
                    token after the most probable one. The ranks that other answers had most often,
                    down to some depth
    dynamic tree    as in EAGLE-2 (arXiv:2406.16858) the nodes whose product of the head's
                    probabilities, from the root on, is largest, down to some depth, `DEPTH` at most

Children are the head's most probable tokens and are not sampled, so the tree depends on the prefix
alone, and a node is accepted with the target's probability of its token, as by token verification:
no exact rule accepts more.

A step costs v(nodes + 1) and c for each of the head's `passes`, of which a chain needs one for each
token, and a tree one for each depth. A pass of the head over several nodes is taken to cost no more
than over one, and choosing nodes nothing, which favours trees. One line of the table for each
model, temperature, machine (`costs_of`), kind and number of nodes:

- `passes`: the depth, the one with the best speed along the answers to other prompts; and `best`,
  whether this line has there the best speed of its kind
- `tokens_per_step`: the target's own token included
- `speed_up`: tokens per step over `cost`, that of a step in plain ones; `over_chain` and
  `over_fixed`: the speed over that of the best chain of both kinds, and of the best fixed tree.
  With 95% intervals over answers, not over costs
- `tree`: the ranks of a fixed tree's nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.acceptance import depth_rates, depth_sums
from specnb.distributions import Sampling, overlap, standardise
from specnb.heads import AttentionDrafter
from specnb.loading import TRAINED_PAIR, load_pair
from specnb.released import load_drafter
from specnb.sampler import generate
from specnb.statistics import Array, Indices, bootstrap
from studies import corpus, study
from studies.files import read_table
from studies.real.smollm2 import head_drafter, model_and_tokenizer, prompts_of
from studies.real.workloads import KINDS, OF_HEAD
from studies.training.chains import Branches, Chains, as_trained

DEPTH = 6  # of a dynamic tree
CHAIN, SAMPLED, FIXED, DYNAMIC = "chain", "sampled chain", "fixed tree", "dynamic tree"
Path = tuple[int, ...]
Rate = Callable[[Indices], Array]  # from the answers that are used, `(..., answers)`, to tokens per step


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


def real_model(prompts: int, prompt_tokens: int) -> Setting:
    """Every other prompt of data/workloads.jsonl for counting, those between for the choice of a tree.
    In float32: in 16 bits many tokens are equally probable, and their ranks would be arbitrary."""
    target, tokenizer = model_and_tokenizer("float32")
    of_kind = -(-2 * prompts // len(KINDS))
    every = [prompt for kind in KINDS for prompt in prompts_of(tokenizer, kind, of_kind)]
    return Setting(target, head_drafter(target, Sampling()), every[::2], every[1::2], tokenizer.eos_token_id)


SETTINGS: dict[str, Callable[[int, int], Setting]] = {"pair": shipped_pair, "smollm2": real_model}


class Costs(NamedTuple):
    """The time of a pass of the head, and of one of the target over n tokens, in passes of the target over one."""

    c: float
    v: Callable[[int], float]


def head_costs(workloads: Any, real_passes: Any) -> dict[str, float]:
    """c of SmolLM2's head by machine, from both tables of the CPU, where a pass over one token reads 4 bits; on the
    H200 it reads 16."""
    c = workloads.query(f"way == 'head {OF_HEAD}'").c.median()
    return {"CPU": c, "H200": c / real_passes.query("bits == 4 and n == 1").gain.item()}


def costs_of(model: str) -> dict[str, Costs]:
    """By machine, from the tables of what was timed. `free`: steps cost what plain ones do, so speed is
    tokens per step. The pair's v is a line through the one that was timed with drafts; on the H200, where
    no pass of a head was timed by itself, c is that on the CPU, in passes that read 16 bits."""
    free = {"free": Costs(0.0, lambda n: 1.0)}
    if model == "pair":
        timed = read_table("results/drafters").query("gamma == 4")
        head = timed[timed.drafter == "EAGLE-3 head"]
        rise = (timed.v.median() - 1) / 4
        return free | {"CPU": Costs(head.draft_cost.median() / 4, lambda n: 1 + rise * (n - 1))}
    alone = read_table("results/real_passes")
    on_cpu, of_head = alone.query("bits == 4"), head_costs(read_table("results/workloads"), alone)
    passes = read_table("results/gpu").query("models == 'smollm2' and kind == 'pass' and way == 'graph' and rows == 1")
    timed_passes = {"CPU": (on_cpu.n, on_cpu.v), "H200": (passes.n, passes.cost)}
    return free | {name: Costs(of_head[name], partial(np.interp, xp=n, fp=v)) for name, (n, v) in timed_passes.items()}


class Along(NamedTuple):
    """What a head says along an answer: at each place `(places, depths)` the rank and the probability
    of the answer's next tokens, NaN and 0 for those that it cannot propose; their overlap with p,
    min(1, q / p) and 1, as in `Acceptance.drafts`; and the largest products of probabilities of any
    nodes there, down to each depth up to `DEPTH` `(places, depths, most + 1)`."""

    rank: Tensor
    probability: Tensor
    compared: Tensor
    values: Tensor


@torch.no_grad()
def along(setting: Setting, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, nodes: int) -> Along:
    """What the head says along `answer`, for trees of at most `nodes` nodes."""
    target, drafter = setting.target, setting.drafter
    tokens, first = torch.tensor([[*prompt, *answer]], device=target.device), len(prompt) - 1
    found = target(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=True)
    p = standardise(found.logits[0, first:], sampling)
    states = torch.cat([found.hidden_states[layer] for layer in drafter.hidden_layers], dim=-1).to(drafter.dtype)
    head, known = as_trained(drafter.head), tokens[:, :-1]
    parts = []
    for features, at in Chains(head, drafter.embedding, nodes)(known, states):
        # A draft begins after each token from the second on; those of the prompt are not measured.
        q, of_p, following = drafter.q(features[0, first - 1 :]), p[at.start - 1 :], tokens[0, at.start + first :]
        own, p_own = (one.gather(1, following[:, None])[:, 0] for one in (q, of_p))
        kept = (own / p_own).clamp_max(1).where(p_own > 0, 0.0)
        rank = (q > own[:, None]).sum(dim=-1).where(own > 0, torch.nan)
        each = [rank, own, overlap(of_p, q), kept, torch.ones_like(own)]
        stacked = torch.stack(each, dim=-1)
        parts.append(pad(stacked, (0, 0, 0, len(answer) - len(stacked)), value=torch.nan))
    both = torch.stack(parts, dim=1)
    return Along(both[..., 0], both[..., 1], both[..., 2:], largest(drafter, head, known, states, first, nodes + 1))


@torch.no_grad()
def largest(drafter: AttentionDrafter, head: Any, tokens: Tensor, states: Tensor, first: int, nodes: int) -> Tensor:
    """The `nodes` largest products of q from the root of a tree on, down to each depth `(places, DEPTH, nodes)`,
    at each place of `tokens` `(1, n)` from `first` on. A node can be among them only if its parent is."""
    seen, slots = Branches(), torch.arange(tokens.shape[1], device=tokens.device)[None]
    state = pad(head.combined(states[:, :-1]), (0, 0, 1, 0))
    state = head.after(state, drafter.embedding(tokens), slots, seen, 0)[:, first:]
    places, width = state.shape[1], 1
    value = torch.ones(places, 1, device=tokens.device)
    found: list[Tensor] = []
    for depth in range(1, DEPTH + 1):
        q = standardise(drafter.output(head.features(state)), drafter.sampling)  # of the tokens that can be proposed
        likely, children = q[0].unflatten(0, (places, width)).topk(nodes)
        value, at = (value[..., None] * likely).flatten(1).topk(nodes)
        found.append(torch.cat([*found[-1:], value], dim=1).topk(nodes).values)
        chosen, parents = children.flatten(1).gather(1, at), at // nodes
        chosen = chosen if drafter.proposed is None else drafter.proposed[chosen]
        seen.parents = (torch.arange(places, device=at.device)[:, None] * width + parents).flatten()
        entered, at_slots = state[:, seen.parents], (slots[0, first:, None] + depth).expand(-1, nodes)
        state = head.after(entered, drafter.embedding(chosen.view(1, -1)), at_slots.reshape(1, -1), seen, 0)
        width = nodes
    return torch.stack(found, dim=1)


def ranks_of(answer: Along) -> list[Path]:
    """The ranks of the next tokens, from 1, at each place of an answer, up to the end of the answer or a token that the
    head cannot propose."""
    return [
        tuple(int(rank) + 1 for rank in takewhile(lambda rank: rank == rank, place)) for place in answer.rank.tolist()
    ]


def by_frequency(answers: Sequence[Along]) -> list[Path]:
    """The ranks that the next tokens of `answers` had, the most frequent first. Those of a parent are at least
    as frequent as those of its child."""
    found: Counter[Path] = Counter()
    for ranks in (ranks for answer in answers for ranks in ranks_of(answer)):
        found.update(ranks[:depth] for depth in range(1, len(ranks) + 1))
    return sorted(found, key=lambda path: (-found[path], len(path), path))


class Draft(NamedTuple):
    """What a step drafts, with so many passes of the head; a fixed tree and a chain by the ranks of their nodes."""

    kind: str
    nodes: int
    passes: int
    tree: frozenset[Path] = frozenset()


def drafts(answers: Sequence[Along], nodes: Sequence[int], sampling: Sampling) -> Iterator[Draft]:
    """All that are compared; ranks are those of `answers`."""
    ordered = by_frequency(answers)
    for count in nodes:
        yield Draft(CHAIN, count, count, frozenset((1,) * depth for depth in range(1, count + 1)))
        if sampling.temperature:
            yield Draft(SAMPLED, count, count)
        for depth in range(1, count + 1):
            tree = frozenset([path for path in ordered if len(path) <= depth][:count])
            yield Draft(FIXED, count, depth, tree)
            if depth <= DEPTH:
                yield Draft(DYNAMIC, count, depth)


def accepted(answer: Along, draft: Draft) -> NDArray[np.int64]:
    """How many draft tokens a step accepts at each place."""
    if draft.kind == DYNAMIC:
        value = answer.probability[:, : draft.passes].nan_to_num(0).cumprod(dim=1)
        # Between the last node of the tree and the first one outside, so that rounding decides nothing.
        least = answer.values[:, draft.passes - 1, draft.nodes - 1 : draft.nodes + 1].mean(dim=1, keepdim=True)
        return (value >= least).sum(dim=1).cpu().numpy()
    places = ranks_of(answer)
    return np.array([sum(ranks[:depth] in draft.tree for depth in range(1, len(ranks) + 1)) for ranks in places])


def rate_of(answers: Sequence[Along], draft: Draft, most: int) -> Rate:
    """Tokens per step. Steps that begin within the last `most` places are not counted; those of a sampled chain,
    with token verification, in expectation."""
    if draft.kind == SAMPLED:
        longest = max(len(answer.compared) for answer in answers)
        missing = (pad(one.compared, (0, 0, 0, 0, 0, longest - len(one.compared)), value=torch.nan) for one in answers)
        sums = depth_sums(torch.stack(list(missing))[:, :, : draft.nodes].double().cpu().numpy())
        return lambda rows: 1 + depth_rates(sums[rows].sum(axis=-2))[..., -1]
    tokens, steps = [], []
    for answer in answers:
        taken, at, begun = accepted(answer, draft), 0, 0
        while at < len(taken) - most:
            at, begun = at + int(taken[at]) + 1, begun + 1
        tokens.append(at)
        steps.append(begun)
    emitted, made = np.array(tokens), np.array(steps)
    return lambda rows: emitted[rows].sum(axis=-1) / made[rows].sum(axis=-1)


def measure(item: str, prompts: int, prompt_tokens: int, new_tokens: int, nodes: Sequence[int]) -> Iterator[Any]:
    """The lines of one model and temperature."""
    name, temperature = item.split("-")
    setting, sampling, most = SETTINGS[name](prompts, prompt_tokens), Sampling(float(temperature)), max(nodes)

    def answers(given: list[list[int]]) -> list[Along]:
        ends = [] if setting.end is None else [setting.end]
        made = generate(
            setting.target, given, None, max_new_tokens=new_tokens, sampling=sampling, eos=ends, progress=False
        )
        pairs = [(prompt, answer) for prompt, answer in zip(given, made.tokens, strict=True) if len(answer) > most]
        return [along(setting, prompt, answer, sampling, most) for prompt, answer in tqdm(pairs, desc=item)]

    yield from compared(item, answers(setting.other), answers(setting.prompts), nodes)


def compared(item: str, other: list[Along], measured: list[Along], nodes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The lines of `measured` answers; depths, ranks and what is best are chosen on `other` ones."""
    name, temperature = item.split("-")
    most = max(nodes)
    every = [*drafts(other, nodes, Sampling(float(temperature)))]
    tokens = np.array([rate_of(other, draft, most)(np.arange(len(other))) for draft in every])

    @cache
    def rate(number: int) -> Rate:
        return rate_of(measured, every[number], most)

    for machine, (c, v) in costs_of(name).items():
        cost = np.array([draft.passes * c + v(draft.nodes + 1) for draft in every])
        speed = tokens / cost

        def best(kinds: Sequence[str], counts: Sequence[int] = nodes, speed: Array = speed) -> int:
            among = (at for at, draft in enumerate(every) if draft.kind in kinds and draft.nodes in counts)
            return max(among, key=lambda at: speed[at])

        def estimated(name: str, at: int, over: float, other: int | None = None) -> dict[str, float]:
            """The rate of draft `at` over `over`, and over that of `other`."""

            def statistic(rows: Indices) -> Array:
                return rate(at)(rows) / over / (1.0 if other is None else rate(other)(rows))

            return study.columns(name, bootstrap(statistic, len(measured), 4000, 0))

        chain, fixed = best((CHAIN, SAMPLED)), best((FIXED,))
        for count, kind in product(nodes, dict.fromkeys(draft.kind for draft in every)):
            at = best((kind,), (count,))
            line = {"model": name, "temperature": float(temperature), "machine": machine, "kind": kind, "nodes": count}
            yield {
                **line, "passes": every[at].passes, **estimated("tokens_per_step", at, 1.0), "cost": cost[at],
                **estimated("speed_up", at, cost[at]), **estimated("over_chain", at, cost[at] / cost[chain], chain),
                **estimated("over_fixed", at, cost[at] / cost[fixed], fixed), "best": at == best((kind,)),
                "answers": len(measured),
                "tree": " ".join(".".join(map(str, path)) for path in sorted(every[at].tree)) if kind == FIXED else "",
            }  # fmt: skip


STUDY = study.Study(
    measure,
    settings={"prompts": 48, "prompt_tokens": 64, "new_tokens": 64, "nodes": (1, 2, 3, 4, 6, 10, 16)},
    small={"prompts": 3, "prompt_tokens": 16, "new_tokens": 12, "nodes": (2, 4)},
    items=("pair-0", "pair-1", "smollm2-0", "smollm2-1"),
    small_items=("pair-1",),
)
