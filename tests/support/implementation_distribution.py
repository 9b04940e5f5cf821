"""The distribution of the real loop, measured by sampling.

Many rows of several prompts go through `specnb.sampler.generate` on tiny transformers,
with cache, batch and several steps. How often each completion came out is compared with its
enumerated probability, which comes from forward passes of the target without any cache, in float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from tiny import ARCHITECTURES, distributions_after, near_copy, next_distributions
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Sampling, overlap
from specnb.drafters import Context, Drafter, ModelDrafter, Proposal
from specnb.enumeration import joint_distribution
from specnb.record import Generation, StepRecord
from specnb.sampler import generate
from specnb.statistics import Fit, detectable_total_variation, goodness_of_fit, merged_cells
from studies.drafters.tables import NgramDrafter, NgramModel

VOCAB = 4
PROMPTS = ((0,), (3, 1), (2, 0, 1, 3))  # rows of different lengths stand side by side
PLAIN = Sampling()
SHARP = Sampling(temperature=0.5, top_k=3)


@dataclass(frozen=True)
class Case:
    """One setting of the loop; `rows` completions are sampled, equally many of each prompt.

    `made_drafter` knows the names of drafters. All other kinds are in
    tests/specnb/test_drafters.py.
    """

    architecture: str
    drafter: str
    gamma: int
    eos: int | None = None
    sampling: Sampling = PLAIN
    tokens: int = 4  # the joint distribution of so many; with rejections they take several steps
    rows: int = 8_400
    attention: str = "eager"  # in one row of so few numbers much faster than sdpa

    def __str__(self) -> str:
        end = "" if self.eos is None else "-eos"
        plain = "" if self.sampling == PLAIN else f"-k{self.sampling.top_k}-p{self.sampling.top_p}"
        return f"{self.architecture}-{self.drafter}-{self.gamma}{end}{plain}"


class Verdict(NamedTuple):
    """How the completions fit the target's distribution, and acceptance its recorded
    probabilities."""

    probs: Fit
    acceptance: float  # p-value
    cells: int

    def detects(self, level: float) -> float:
        """The smallest total variation that would have been found with power 0.99 at false-alarm
        rate `level`."""
        return detectable_total_variation(self.cells - (len(PROMPTS) - 1), self.probs.n, level)


def measure(case: Case, loop: Callable[..., Generation] | None = None) -> Verdict:
    """Generates, checks the record against the tokens (`AssertionError`), and compares both with
    the theory.

    `loop` stands for `generate` with a bug in it, which knows its sampling settings itself.
    """
    target = eager(case.architecture)
    target.set_attn_implementation(case.attention)
    run = loop or partial(generate, sampling=case.sampling)
    made = run(
        target,
        PROMPTS * (case.rows // len(PROMPTS)),
        made_drafter(case),
        gamma=case.gamma,
        max_new_tokens=case.tokens,
        eos=case.eos,
        seed=zlib.crc32(str(case).encode()),  # a seed of its own for every case
        progress=False,
    )
    check_record(made)
    probs, cells = fit(case, target, made.tokens)
    return Verdict(probs, acceptance_p_value(made.record), cells)


def made_drafter(case: Case) -> Drafter | PreTrainedModel | None:
    """The drafter that a case names; a model has the target's architecture, one layer and other
    weights."""
    make = ARCHITECTURES[case.architecture]
    model, near = make(VOCAB, seed=100, layers=1), near_copy(make(VOCAB), noise=0.2)
    for one in (model, near):
        one.set_attn_implementation(case.attention)
    counted = np.random.default_rng(0).integers(0, VOCAB, 200)
    drafters: dict[str, Drafter | PreTrainedModel | None] = {
        "model": model,
        "near": near,
        "sharp": ModelDrafter(model, SHARP),
        "argmax": ModelDrafter(model, Sampling(temperature=0)),
        "patchy": PatchyDrafter(model),
        "ngram": NgramDrafter(NgramModel(counted, 3, VOCAB)),
        "alone": None,
    }
    return drafters[case.drafter]


class PatchyDrafter(ModelDrafter):
    """Proposes nothing at every third position of a sequence: token -1, q = 0. Decided by the
    position alone."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens, q = super().propose(context, uniforms)
        places = context.lengths[:, None] + torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
        missing = places % 3 == 0
        return Proposal(draft_tokens.masked_fill(missing, -1), q.masked_fill(missing[..., None], 0.0))


def fit(case: Case, target: PreTrainedModel, sequences: list[list[int]]) -> tuple[Fit, int]:
    """Pearson's test over all (prompt, completion) cells, and how many cells were left to it.

    All completions that the target cannot emit have one cell, of probability zero.
    """
    counts, distributions = [], []
    for number, prompt in enumerate(PROMPTS):
        probs = completion_distribution(case, target, prompt)
        seen, times = np.unique(codes(sequences[number :: len(PROMPTS)]), return_counts=True)
        observed = dict(zip(seen.tolist(), times.tolist(), strict=True))
        counts += [observed.pop(code, 0) for code in probs] + [sum(observed.values())]
        distributions += [*probs.values(), 0.0]
    expected = np.array(distributions) / len(PROMPTS)
    cells = 1 + int(merged_cells(expected * len(sequences)).max())
    return goodness_of_fit(np.array(counts), expected, fitted=len(PROMPTS) - 1), cells


def completion_distribution(case: Case, target: PreTrainedModel, prompt: tuple[int, ...]) -> dict[int, float]:
    """The probability of each completion, by `codes`: `case.tokens` tokens, or fewer up to and with
    `eos`."""
    joint = joint_distribution(distributions_after(target, prompt, case.tokens, case.sampling), case.tokens)
    probs: dict[int, float] = {}
    for tokens, chance in zip(np.ndindex(*joint.shape), joint.flatten().tolist(), strict=True):
        ended = tokens[: tokens.index(case.eos) + 1] if case.eos in tokens else tokens
        code = int(codes([list(ended)])[0])
        probs[code] = probs.get(code, 0.0) + chance
    return probs


def refilled(
    target: PreTrainedModel, drafter: Drafter | PreTrainedModel | None, rows: int, **settings: Any
) -> Generation:
    """Completions of 4 tokens by a batch of a third of the rows, so that most prompts take over a
    row."""
    return generate(
        target, PROMPTS * (rows // 3), drafter, max_new_tokens=4, batch_size=rows // 3, progress=False, **settings
    )


def eager(architecture: str) -> PreTrainedModel:
    """A tiny target with the attention that is faster for so few numbers."""
    target: PreTrainedModel = ARCHITECTURES[architecture](VOCAB)
    target.set_attn_implementation("eager")
    return target


def completions_p_value(made: Generation, architecture: str, eos: int | None = None) -> float:
    """Whether completions of 4 tokens, as `refilled` makes them, have the target's joint
    distribution."""
    case = Case(architecture, "-", 1, eos=eos, tokens=4)
    return fit(case, ARCHITECTURES[architecture](VOCAB), made.tokens)[0].p_value


def codes(sequences: list[list[int]]) -> np.ndarray:
    """One number for each completion, whatever its length."""
    longest = max(map(len, sequences))
    padded = np.array([[token + 1 for token in tokens] + [0] * (longest - len(tokens)) for tokens in sequences])
    return padded @ (VOCAB + 1) ** np.arange(longest)


def acceptance_p_value(record: StepRecord) -> float:
    """Whether draft tokens were accepted as often as `beta` says: at each one tested, its
    probability given all before.

    In a tree that is so for the first child of each node. The differences are martingale
    increments, so their sum has the summed variance beta (1 - beta).
    """
    tested = record.tested
    if record.parents is not None:
        tested &= np.array([record.parents.index(parent) == node for node, parent in enumerate(record.parents)])
    accepted, beta = record.accepted_nodes[tested], record.beta[tested]
    spread = np.sqrt((beta * (1 - beta)).sum())
    return float(2 * stats.norm.sf(abs((accepted - beta).sum()) / spread)) if spread > 0 else 1.0


def check_record(made: Generation) -> None:
    """The record says of every seventh row what was emitted, and no row took more steps than it has
    tokens."""
    record = made.record
    assert record.emitted.sum(axis=1).tolist() == [len(tokens) for tokens in made.tokens]
    assert (record.emitted <= record.accepted + 1).all()
    assert (record.target_passes <= [len(tokens) for tokens in made.tokens]).all()
    # Of all rows: computed once.
    passes, accepted_nodes = record.target_passes, record.accepted_nodes
    for row in range(0, len(made.tokens), 7):
        emitted: list[int] = []
        for step in range(passes[row]):
            accepted = record.draft_tokens[row, step][accepted_nodes[row, step]].tolist()
            emitted += [*accepted, int(record.token[row, step])][: record.emitted[row, step]]
        assert emitted == made.tokens[row]


FALSE_ALARMS = 1e-6
TOP_K, TOP_P = Sampling(top_k=3), Sampling(0.8, top_p=0.9)
MANY = 112_500

CASES = [
    # Many rows, to find small deviations.
    Case("gpt2", "sharp", 3, tokens=3, rows=MANY),
    Case("llama", "near", 1, tokens=3, eos=1, rows=MANY),
    # Fewer rows, more tokens and settings.
    Case("llama", "near", 3),
    Case("gpt2", "near", 3, eos=1),
    Case("llama", "model", 1),
    Case("gpt2", "model", 1, eos=2),
    Case("gpt2", "sharp", 3, sampling=TOP_K),
    Case("llama", "sharp", 3, eos=2, sampling=TOP_P),
    Case("llama", "patchy", 3),
    Case("gpt2", "patchy", 1, eos=1),
    Case("llama", "ngram", 3, eos=1),
    Case("gpt2", "ngram", 1, sampling=TOP_P),
    Case("gpt2", "argmax", 3),
    Case("llama", "argmax", 1, eos=1),
    Case("llama", "alone", 0),
    Case("gpt2", "alone", 0, eos=1),
    Case("llama", "model", 3, attention="sdpa"),
]
LEVEL = FALSE_ALARMS / (2 * len(CASES))  # two tests of each case


def overlap_error(architecture: str, drafter: Callable[[PreTrainedModel], Drafter] = ModelDrafter) -> tuple[float, int]:
    """The largest difference between a recorded overlap and that of both models run without a
    cache, and how often all draft tokens of a step were accepted."""
    target = ARCHITECTURES[architecture](VOCAB, dtype=torch.float64)
    draft = near_copy(target, noise=0.05)
    prompts = PROMPTS * 4
    made = generate(target, prompts, drafter(draft), gamma=3, max_new_tokens=9, seed=3, progress=False)
    record, worst, fully = made.record, 0.0, 0
    for row, prompt in enumerate(prompts):
        known = [*prompt]
        for step in range(record.target_passes[row]):
            for at in range(record.tested[row, step].sum()):
                context = [known + record.draft_tokens[row, step, :at].tolist()]
                exact = overlap(next_distributions(target, context), next_distributions(draft, context))
                worst = max(worst, abs(float(exact) - record.beta[row, step, at]))
            fully += record.emitted[row, step] == record.gamma + 1
            emitted = record.emitted[row, step]
            known += made.tokens[row][len(known) - len(prompt) :][:emitted]
    return worst, fully
