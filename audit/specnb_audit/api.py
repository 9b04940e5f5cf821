"""`audit`: is a sampler lossless? Compares the tokens of any generator with the target's
distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specnb.arguments import token_list
from specnb.distributions import Sampling
from specnb_audit.auditor import Ends, end_tokens
from specnb_audit.constraints import NO_CONSTRAINTS, Constraints
from specnb_audit.engine import Aim, Engine
from specnb_audit.report import Report
from specnb_audit.run import Progress, Settings, audit_completions, require_models
from specnb_audit.run import audit_distributions as audit_distributions
from specnb_audit.teacher_forcing import Completion, Models, Source


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

    An exact sampler is rejected with probability at most `delta`, whenever one stops.

    Parameters
    ----------
    target : PreTrainedModel or callable
        The model, or a function from all tokens before (prompt included) to probabilities
        `(vocab,)`.
    completions, prompts : sequences of sequences of int
        The new tokens of each sequence, and the tokens before them.
    sampling : Sampling
        The settings claimed; `Claimed` adds an order of filters and penalties.
    eos, max_new_tokens
        The tokens that end a sequence, and its length without one; checked only if given.
    draft : PreTrainedModel or callable, optional
        The draft model: adds bets on failures of speculative decoding.
    steps : sequences of int, optional
        Tokens emitted by each step: adds bets on positions in a step. Leave it out for rules that
        do not decide token by token, such as block verification: there the length of a step depends
        on later tokens.
    delta, seed
        The false-alarm rate, and the seed of the audit's own uniforms.
    stop : bool
        Whether to stop as soon as exactness is rejected.
    engine : Engine
        Its rounding errors, control, and how it samples its draft.
    aim : Aim
        Which deviations are looked for.
    constraints : Constraints, or one for each sequence
        What was done to single tokens beside sampling.
    logprobs : sequences of float, optional
        The engine's own log-probabilities; the report says what they fit.
    progress : bool or callable
        Whether to show a bar; a function gets lines instead.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        For tokens that are no whole numbers.
    ValueError
        For no completions, tokens outside the vocabulary, sequences beyond the model's positions,
        different vocabularies, and bad settings, before any model runs.

    Examples
    --------
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
    if not len(completions):
        raise ValueError("there are no tokens to audit; give at least one completion with a token in it")

    def lists(name: str, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return [token_list(f"{name} {number}", row) for number, row in enumerate(rows)]

    sizes: list[list[int] | None] = [None] * len(completions)
    if steps is not None:
        sizes = [[size for size in row if size > 0] for row in lists("steps", steps)]
    return list(map(Completion, lists("prompt", prompts), lists("completion", completions), sizes))
