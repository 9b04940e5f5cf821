"""The checks with which engines test their own samplers, built again from their design: what they let through.

Each looks at one rule in isolation, with one law p and one q at every position, whatever was emitted before. So
nothing that lives in a cache, in a position or between the steps is in front of them. `python -m specnb.audit.checks`
runs them on the bugs of the museum and records how often each bug passes, in `data/results/checks.csv`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from specnb.audit.museum import EXACT, MUSEUM
from specnb.audit.museum import generate as generate_wrong
from specnb.audit.mutants import PLAIN, Mutant, argmax_law, unchanged
from specnb.decode import generate
from specnb.law import Sampling, draw, normalise
from specnb.models import Pair, load_pair
from specnb.results import out, write
from specnb.verify import token_verification

Check = Callable[[Mutant, np.random.Generator], bool]
"""Whether a sampler passes, on laws that are drawn anew each time."""

CHUNK = 2**23  # numbers of each law that are at hand at once


def emitted(mutant: Mutant, p: Tensor, q: Tensor, gamma: int, n: int, generator: np.random.Generator) -> Tensor:
    """Tokens `(n, gamma + 1)` of n steps, -1 behind the last, with the laws `(vocab,)` p and q at every position."""
    blocks, rows = [], max(1, CHUNK // (len(p) * (gamma + 1)))
    target = p if mutant.p is None else mutant.p(p.expand(gamma + 1, -1))
    drafted = q if mutant.drawn is None else mutant.drawn(q)
    read = q if mutant.q is None else mutant.q(q)
    for start in range(0, n, rows):
        count = min(rows, n - start)
        u = torch.from_numpy(generator.random((count, 2 * gamma + 1)))
        drafts = draw(drafted.expand(count, gamma, -1), u[:, :gamma])
        laws = target.expand(count, gamma + 1, -1), read.expand(count, gamma, -1)
        accepted, token = mutant.rule(*laws, drafts, u[:, gamma : 2 * gamma], u[:, -1])
        offsets = torch.arange(gamma + 1)
        block = torch.cat([drafts, token[:, None]], dim=1).where(offsets < accepted[:, None], token[:, None])
        blocks.append(block.where(offsets <= accepted[:, None], -1))
    return torch.cat(blocks)


def vllm_v1(mutant: Mutant, generator: np.random.Generator) -> bool:
    """vLLM's rejection sampler: 10 tokens, 2 drafts, laws softmax(uniform). From 10 to 100,000 samples the distance
    to the target must shrink 20 times as much as that to random laws. The bonus token is not looked at."""
    vocab, gamma, references = 10, 2, 100
    laws = torch.softmax(torch.from_numpy(generator.random((references + 2, vocab))), dim=-1)
    shrunk = []
    for n in (10, 100_000):
        tokens = emitted(mutant, laws[0], laws[1], gamma, n, generator)[:, :-1]
        share = _shares(tokens[tokens >= 0], vocab)
        shrunk.append((float((share - laws[0]).norm()), float((share - laws[2:]).norm())))
    (target_few, other_few), (target_many, other_many) = shrunk
    return target_few / target_many > 20 * other_few / other_many


def vllm_v2(mutant: Mutant, generator: np.random.Generator) -> bool:
    """vLLM's model runner V2: 4096 tokens, normal logits, 40,960 steps; at each position chi-square below its mean
    plus 10 standard deviations. (It has since got a second test, of 16 tokens, aimed at shared noise.)"""
    vocab, gamma, n = 4096, 1, 40_960
    p, q = torch.softmax(torch.from_numpy(generator.standard_normal((2, vocab))).float(), dim=-1)
    tokens = emitted(mutant, p, q, gamma, n, generator)
    return all(_within_ten_sigma(column[column >= 0], p.double()) for column in tokens.T)


def tensorrt_llm(mutant: Mutant, generator: np.random.Generator) -> bool:
    """TensorRT-LLM: 500 tokens, all but 100 of each law impossible, 50,000 steps; the divergence of what was sampled
    must be within 0.01 of that of as many plain draws from the target."""
    vocab, n = 500, 50_000
    p, q = (_sparse(torch.from_numpy(generator.random(vocab)), 100) for _ in "pq")
    plain = draw(p.expand(n, -1), torch.from_numpy(generator.random(n)))
    tokens = emitted(mutant, p, q, 1, n, generator)[:, 0]
    divergences = [float(stats.entropy(p, _shares(sample, vocab))) for sample in (tokens, plain)]
    return abs(divergences[0] - divergences[1]) < 0.01


CHECKS: dict[str, tuple[Check, int]] = {
    "vLLM V1": (vllm_v1, 20),
    "vLLM V2": (vllm_v2, 3),
    "TensorRT-LLM": (tensorrt_llm, 5),
}
"""The checks and how often each is repeated here."""


def score_passes(accuracy: float, questions: int = 200, threshold: float = 0.8) -> float:
    """sglang: the chance that a model which solves `accuracy` of GSM8K scores more than 0.8 on 200 questions.

    It looks at no law at all, so this is all there is to build again.
    """
    return float(stats.binom.sf(np.floor(threshold * questions), questions, accuracy))


def greedy_passes(mutant: Mutant, pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int) -> bool:
    """transformers: at temperature 0 the text equals plain decoding's. (Its test with sampling compares nothing.)"""
    greedy = Sampling(temperature=0)
    plain = generate(pair.target, prompts, max_new_tokens=new_tokens, sampling=greedy, progress=False)
    made = generate_wrong(
        at_temperature_0(mutant), pair.target, prompts, pair.draft, max_new_tokens=new_tokens, progress=False
    )
    return made.tokens == plain.tokens


def at_temperature_0(mutant: Mutant) -> Mutant:
    """The same bug in greedy decoding: what was a law becomes the certainty of its most probable token."""
    if mutant.asked.temperature == 0:
        return mutant
    p, q, drawn = mutant.p, mutant.q or unchanged, mutant.drawn or unchanged
    return replace(
        mutant,
        asked=Sampling(temperature=0),
        p=None if p is None else lambda laws: argmax_law(p(laws)),
        q=lambda laws: argmax_law(q(laws)),
        drawn=lambda laws: argmax_law(drawn(laws)),
    )


def exercised(mutant: Mutant) -> bool:
    """Whether a check of one rule at temperature 1, without filters, comes past the code that is wrong."""
    in_the_rule = mutant.plant is None or mutant.rule is not token_verification
    return in_the_rule and mutant.asked == PLAIN


def _shares(tokens: Tensor, vocab: int) -> Tensor:
    return torch.bincount(tokens, minlength=vocab).double() / len(tokens)


def _sparse(weights: Tensor, keep: int) -> Tensor:
    return normalise(weights.where(weights >= weights.topk(keep)[0][-1], 0.0))


def _within_ten_sigma(tokens: Tensor, law: Tensor, least: float = 5.0) -> bool:
    counts, expected = torch.bincount(tokens, minlength=len(law)).double(), law * len(tokens)
    rare = expected < least
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, wanted = observed[wanted >= least], wanted[wanted >= least]
    freedom = len(wanted) - 1
    return freedom < 1 or float(((observed - wanted) ** 2 / wanted).sum()) < freedom + 10 * (2 * freedom) ** 0.5


def main() -> None:
    """Runs every check on every bug that has no record yet, and records how often it passed, out of how many."""
    path, pair = out() / "data" / "results" / "checks.csv", load_pair()
    prompts = [pair.encode(text) for text in ("def f(x):", "import numpy", "class Graph:\n    ", "for i in range(")]
    for mutant in tqdm([EXACT, *MUSEUM.values()], desc="checks"):
        done = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["mutant", "check", "passed", "runs"])
        if (done.mutant == mutant.name).any():
            continue
        rows = list(done.itertuples(index=False, name=None))
        for at, (name, (check, repeats)) in enumerate(CHECKS.items()):
            if exercised(mutant):
                passed = sum(check(mutant, np.random.default_rng([at, repeat])) for repeat in range(repeats))
                rows.append((mutant.name, name, passed, repeats))
        rows.append((mutant.name, "transformers", int(greedy_passes(mutant, pair, prompts, 48)), 1))
        table = pd.DataFrame(rows, columns=done.columns)
        write(path, table.to_csv(index=False, lineterminator="\n"))


if __name__ == "__main__":
    main()
