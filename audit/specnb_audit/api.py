"""`audit`: is a sampler lossless? Compares the tokens of any generator with the target's
distributions.

`audit` runs the target over the sequences, `audit_distributions` takes distributions that exist
already, and `Auditor` takes sequence after sequence. An exact sampler is rejected with probability
at most `delta`, whenever one stops (`specnb_audit.evidence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specnb.distributions import Sampling
from specnb_audit.auditor import Ends, end_tokens
from specnb_audit.constraints import NO_CONSTRAINTS, Constraints
from specnb_audit.engine import Aim, Engine
from specnb_audit.report import Report
from specnb_audit.run import Progress, Settings, audit_completions, require_models
from specnb_audit.run import audit_distributions as audit_distributions
from specnb_audit.teacher_forcing import Completion, Models, Source, vocabulary


def audit(
    target: Source,
    completions: Sequence[Sequence[int]],
    *,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    eos: Ends = None,
    max_new_tokens: int | None = None,
    draft: Source | None = None,
    steps: Sequence[Sequence[int]] | None = None,
    delta: float = 1e-6,
    seed: int = 0,
    stop: bool = False,
    engine: Engine = Engine(),
    aim: Aim = Aim(),
    constraints: Constraints | Sequence[Constraints] = NO_CONSTRAINTS,
    logprobs: Sequence[Sequence[float | None]] | None = None,
    progress: Progress = True,
) -> Report:
    """Whether `completions` were sampled from the distribution of `target` under the settings
    claimed.

    target          a model of transformers, or a function from all tokens before (prompt included)
                    to probabilities `(vocab,)`
    completions     the new tokens of each sequence, and `prompts` the tokens before them
    sampling        temperature, top-k, top-p and min-p claimed; `specnb_audit.claimed.Claimed` adds
                    another order and penalties, and `specnb_audit.claimed.claimed_sampling` takes
                    an engine's settings by name
    eos             tokens that end a sequence, and `max_new_tokens` its length without one; how
                    sequences end is checked only where these are given
    draft           the draft model: adds bets on failures of speculative decoding
    steps           number of tokens emitted by each step of each sequence: adds bets on positions
                    in a step. Valid for rules that decide token by token; leave it out for others
                    (block verification), where the length of a step depends on the tokens after it
    delta           largest probability that an exact sampler is rejected
    seed            of the audit's own uniforms
    stop            whether to stop as soon as exactness is rejected
    engine          what is known of the engine: its rounding errors, which are no fault of a
                    sampler, its control, and how it samples its draft
    aim             which deviations are looked for
    constraints     what was done to single tokens beside sampling: forced tokens, `min_tokens`,
                    allowed tokens; of all sequences, or of each
    logprobs        the engine's log-probabilities of its tokens; they are compared with the
                    target's, and the report says what they fit
    progress        whether to show a bar; a function gets plain lines instead

    Raises `ValueError` for no completions, tokens outside the vocabulary, sequences beyond the
    model's limit, and different vocabularies. Settings are checked before any model runs.

    >>> import random
    >>> biased = lambda prefix: [0.9, 0.1]
    >>> random.seed(0)
    >>> exact = [random.choices([0, 1], [9, 1], k=50) for _ in range(4)]
    >>> audit(biased, exact, prompts=[[]] * 4, progress=False).rejected
    False
    >>> report = audit(biased, [[1, 0] * 25] * 4, prompts=[[]] * 4, progress=False)
    >>> report.rejected
    True
    """
    given = _completions(completions, prompts, steps)
    each = [constraints] * len(given) if isinstance(constraints, Constraints) else constraints
    values = [None] * len(given) if logprobs is None else [list(one) for one in logprobs]
    if {len(each), len(values)} != {len(given)}:
        raise ValueError(f"there are {len(given)} completions; give constraints and logprobs for each")
    given = [one._replace(constraints=own, logprobs=its) for one, own, its in zip(given, each, values, strict=True)]
    ends = tuple(sorted(end_tokens(eos)))
    models = Models(target, sampling, draft, engine.draft_sampling or sampling, aim.suspected, ends)
    settings = Settings(delta, seed, eos, max_new_tokens, aim.ignore, stop, progress)
    settings.auditor()  # raises for bad settings
    end_tokens(eos, vocabulary(target, given[0].prompt))
    require_models(models, [*given, *engine.control])
    return audit_completions(models, given, settings, engine, expected=sum(len(one.tokens) for one in given))


def assert_exact(target: Source, completions: Sequence[Sequence[int]], **settings: Any) -> Report:
    """The report of `audit`, for tests: raises `AssertionError` with the report as message if
    exactness is rejected.

    >>> report = assert_exact(lambda prefix: [0.5, 0.5], [[0, 1, 1, 0]], prompts=[[]])
    >>> report.tokens
    4
    >>> assert_exact(lambda prefix: [0.5, 0.5, 0.0], [[0, 2]], prompts=[[]])
    Traceback (most recent call last):
        ...
    AssertionError: REJECTED after 2 tokens: a token has probability zero under the settings claimed
    audit of 2 tokens in 1 sequence, false-alarm rate at most 1e-06; 1 of 2 tokens is impossible (50%)
      impossible (1)
    e-value: infinite
    impossible: sequence 0, position 1: token 2
    ...
    """
    report = audit(target, completions, **({"progress": False} | settings))
    if report.rejected:
        raise AssertionError(str(report))
    return report


def _completions(
    completions: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]] | None
) -> list[Completion]:
    for name, other in (("prompts", prompts), ("steps", steps)):
        if other is not None and len(other) != len(completions):
            raise ValueError(f"there are {len(completions)} completions and {len(other)} {name}; give one for each")
    if not completions:
        raise ValueError("there are no tokens to audit; give at least one completion with a token in it")
    sizes = [None] * len(completions) if steps is None else [[int(size) for size in row if size != 0] for row in steps]
    return [
        Completion([int(token) for token in prompt], [int(token) for token in tokens], size)
        for prompt, tokens, size in zip(prompts, completions, sizes, strict=True)
    ]
