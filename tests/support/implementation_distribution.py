"""The law of the real loop, measured: what `test_engine_law` and `test_engine_mutants` both run.

Many rows of several prompts go through `specnb.decode.generate` on tiny transformers, with cache, batch
and several steps; how often each text came out is compared with its enumerated probability, which
comes from full runs of the target without any cache, in float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from tiny import ARCHITECTURES, laws_after, near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb import decode
from specnb.draft import Drafter, ModelDraft, Proposal
from specnb.estimate import Fit, _without_rare_cells, detectable_total_variation, goodness_of_fit
from specnb.exact import joint_law
from specnb.law import Sampling
from specnb.ngram import NgramDraft, NgramModel

VOCAB = 4
PROMPTS = ((0,), (3, 1), (2, 0, 1, 3))  # rows of different lengths stand side by side
PLAIN = Sampling()
SHARP = Sampling(temperature=0.5, top_k=3)


@dataclass(frozen=True)
class Case:
    """One setting of the loop; `rows` texts are drawn, equally many from each prompt."""

    architecture: str
    drafter: str
    gamma: int
    eos: int | None = None
    sampling: Sampling = PLAIN
    tokens: int = 4  # the joint law of so many; with rejections they take several steps
    rows: int = 8_400
    attention: str = "eager"  # in one row of so few numbers much faster than sdpa
    device: str = "cpu"

    def __str__(self) -> str:
        end = "" if self.eos is None else "-eos"
        plain = "" if self.sampling == PLAIN else f"-k{self.sampling.top_k}-p{self.sampling.top_p}"
        return f"{self.architecture}-{self.drafter}-{self.gamma}{end}{plain}"


class Verdict(NamedTuple):
    """How the emitted texts fit the target's law, and the accepted drafts their recorded chances."""

    law: Fit
    acceptance: float  # p-value
    cells: int

    def detects(self, level: float) -> float:
        """The smallest total variation that would have been found with power 0.99 at false-alarm rate `level`."""
        return detectable_total_variation(self.cells - (len(PROMPTS) - 1), self.law.n, level)


def measure(case: Case, generate: Callable[..., decode.Generation] | None = None) -> Verdict:
    """Generates, checks the record against the texts (`AssertionError`), and compares both with the theory.

    `generate` stands for the loop with a bug in it; what that draws with, it knows itself.
    """
    target = ARCHITECTURES[case.architecture](VOCAB)
    target.set_attn_implementation(case.attention)
    write = generate or partial(decode.generate, sampling=case.sampling)
    made = write(
        target.to(case.device),
        PROMPTS * (case.rows // len(PROMPTS)),
        made_drafter(case),
        gamma=case.gamma,
        max_new_tokens=case.tokens,
        eos=case.eos,
        seed=zlib.crc32(str(case).encode()),  # every case its own noise
        progress=False,
    )
    check_record(made)
    law, cells = fit(case, target.cpu(), made.tokens)
    return Verdict(law, acceptance_p_value(made.record), cells)


def made_drafter(case: Case) -> Drafter | PreTrainedModel | None:
    """The drafter that a case names; a model has the target's architecture, one layer and other weights."""
    make = ARCHITECTURES[case.architecture]
    model, near = make(VOCAB, seed=100, layers=1), near_copy(make(VOCAB), noise=0.2)
    for one in (model, near):
        one.set_attn_implementation(case.attention)
        one.to(case.device)
    counted = np.random.default_rng(0).integers(0, VOCAB, 200)
    return {
        "model": model,
        "near": near,
        "sharp": ModelDraft(model, SHARP),
        "argmax": ModelDraft(model, Sampling(temperature=0)),
        "patchy": PatchyDraft(model),
        "ngram": NgramDraft(NgramModel(counted, 3, VOCAB)),
        "alone": None,
    }[case.drafter]


class PatchyDraft(ModelDraft):
    """Has nothing to propose at every third place of a text: draft -1, law zero.

    Which places is decided by what stands before them; a drafter that took back what it had drawn
    after seeing it would have to report another law.
    """

    def propose(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Proposal:
        drafts, q = super().propose(tokens, lengths, uniforms)
        places = lengths[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        missing = places % 3 == 0
        return Proposal(drafts.masked_fill(missing, -1), q.masked_fill(missing[..., None], 0.0))


def fit(case: Case, target: PreTrainedModel, texts: list[list[int]]) -> tuple[Fit, int]:
    """Pearson's test over all (prompt, text) cells, and how many cells were left to it.

    A text that the target cannot emit has a cell of its own, with probability zero.
    """
    counts, laws = [], []
    for number, prompt in enumerate(PROMPTS):
        law = text_law(case, target, prompt)
        seen, times = np.unique(codes(texts[number :: len(PROMPTS)]), return_counts=True)
        observed = dict(zip(seen.tolist(), times.tolist(), strict=True))
        counts += [observed.pop(code, 0) for code in law] + [sum(observed.values())]
        laws += [*law.values(), 0.0]
    expected = np.array(laws) / len(PROMPTS)
    cells = len(_without_rare_cells(expected, expected * len(texts))[1])
    return goodness_of_fit(np.array(counts), expected, fitted=len(PROMPTS) - 1), cells


def text_law(case: Case, target: PreTrainedModel, prompt: tuple[int, ...]) -> dict[int, float]:
    """The probability of each text, by `codes`: `case.tokens` tokens, or fewer up to and with `eos`."""
    joint = joint_law(laws_after(target, prompt, case.tokens, case.sampling), case.tokens)
    law: dict[int, float] = {}
    for tokens, chance in zip(np.ndindex(*joint.shape), joint.flatten().tolist(), strict=True):
        text = tokens[: tokens.index(case.eos) + 1] if case.eos in tokens else tokens
        code = int(codes([list(text)])[0])
        law[code] = law.get(code, 0.0) + chance
    return law


def codes(texts: list[list[int]]) -> np.ndarray:
    """One number for each text, whatever its length."""
    longest = max(map(len, texts))
    padded = np.array([[token + 1 for token in text] + [0] * (longest - len(text)) for text in texts])
    return padded @ (VOCAB + 1) ** np.arange(longest)


def acceptance_p_value(record: decode.StepRecord) -> float:
    """Whether drafts were accepted as often as `beta` says: at each draft tested, the chance given all before.

    The differences are martingale increments, so their sum has the summed variance beta (1 - beta).
    """
    tested = record.tested
    hit = np.arange(record.gamma) < record.accepted[..., None]
    beta = record.beta[tested]
    spread = np.sqrt((beta * (1 - beta)).sum())
    return float(2 * stats.norm.sf(abs((hit[tested] - beta).sum()) / spread)) if spread > 0 else 1.0


def check_record(made: decode.Generation) -> None:
    """The record tells the same story as the texts, and no text took more target runs than it has tokens."""
    record = made.record
    assert record.emitted.sum(axis=1).tolist() == [len(text) for text in made.tokens]
    assert (record.emitted <= record.accepted + 1).all()
    assert (record.target_runs <= [len(text) for text in made.tokens]).all()
    for row in range(0, len(made.tokens), 7):
        told: list[int] = []
        for step in range(record.emitted.shape[1]):
            accepted = record.drafts[row, step, : record.accepted[row, step]].tolist()
            told += [*accepted, int(record.token[row, step])][: record.emitted[row, step]]
        assert told == made.tokens[row]


def smaller(case: Case, rows: int) -> Case:
    """The same case with fewer rows."""
    return replace(case, rows=rows)
