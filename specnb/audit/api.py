"""The audit: is a sampler lossless? Tokens of any generator against the distributions of the target, and nothing else.

`audit` runs the target once over the texts, `audit_laws` takes distributions that are there already, and
`Auditor` judges text by text and can be stopped at any time. What a verdict means: an exact sampler is
rejected with probability at most `delta`, however long one looks on (`specnb.audit.evidence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.audit.auditor import Auditor, Ends, end_tokens
from specnb.audit.bets import Row
from specnb.audit.numerics import Numerics, measure_numerics
from specnb.audit.report import Report
from specnb.audit.teacher_forcing import Completion, Source, require_completions, teacher_forced_rows, vocabulary
from specnb.models.support import require_same_vocabulary
from specnb.sampling.distributions import Sampling


def audit_distributions(
    rows: Iterable[Row],
    *,
    delta: float = 1e-6,
    seed: int = 0,
    eos: Ends = None,
    max_new_tokens: int | None = None,
    numerics: Numerics | None = None,
    stop: bool = False,
    detect: bool = True,
    progress: bool = True,
    expected: int | None = None,
) -> Report:
    """The report on `rows`, whose distributions are there already; they may come one at a time from a generator.

    `stop` ends it as soon as exactness is rejected. `expected` is the number of tokens for the bar, which
    shows the evidence. An interrupt from the keyboard ends it too, with the report on what was seen, if anything was.
    """
    auditor = Auditor(delta, seed, eos, max_new_tokens, numerics)
    stopped = ""
    with tqdm(total=expected, desc="audit", unit="token", delay=3, leave=False, disable=not progress) as bar:
        try:
            for row in rows:
                auditor.add(row)
                bar.update(len(row.tokens))
                bar.set_postfix_str(f"e = 10^{auditor.log10_e:.1f}", refresh=False)
                if stop and auditor.found_after is not None:
                    break
        except KeyboardInterrupt:
            if auditor.tokens == 0:
                raise
            stopped = f"stopped by hand after {auditor.tokens:,} tokens"
    report = auditor.report(detect)
    return replace(report, interrupted=True, notes=[stopped]) if stopped else report


@torch.inference_mode()
def audit(
    target: Source,
    completions: Sequence[Sequence[int]],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    starts: Sequence[int] | None = None,
    sampling: Sampling = Sampling(),
    draft: Source | None = None,
    draft_sampling: Sampling | None = None,
    steps: Sequence[Sequence[int]] | None = None,
    eos: Ends = None,
    max_new_tokens: int | None = None,
    delta: float = 1e-6,
    seed: int = 0,
    stop: bool = False,
    numerics: int = 16,
    detect: bool = True,
    progress: bool = True,
) -> Report:
    """Whether `texts` were drawn from the distribution of `target` under the settings claimed.

    `target` is a model of transformers, or a function from all tokens before, prompt included, to a distribution
    `(vocab,)`. `texts` are the new tokens of each generation and `prompts` what stood before them; or texts hold both
    and `starts` says where each generation begins. `draft` with `draft_sampling` (default: `sampling`) aims the
    bets at failures of speculative decoding. `steps`, the tokens emitted by each step of each text, aims them at
    places in a step; that is right for rules that decide token by token, and must be left out for others (block
    verification), where the length of a step tells something about its tokens. `eos` and `max_new_tokens` say
    how texts end; how they do is judged only where these are given. `stop` spares the target what comes after a
    rejection. `seed` is that of the audit's own uniforms. `numerics` is the number of positions
    at which a model's run over a text is compared with runs over one token.

    Raises `ValueError` for no texts, tokens outside the vocabulary, contexts beyond the model's limit, and
    different vocabularies. Settings are checked before any model runs.
    """
    Auditor(delta, seed, eos, max_new_tokens)
    given = _texts(completions, prompts, starts, steps)
    require_completions(target, given)
    end_tokens(eos, vocabulary(target, given[0].prompt))
    if draft is not None:
        if isinstance(target, PreTrainedModel) and isinstance(draft, PreTrainedModel):
            require_same_vocabulary(target, draft.config.vocab_size)
        require_completions(draft, given)
    measured = None
    if isinstance(target, PreTrainedModel) and numerics > 0 and any(text.tokens for text in given):
        measured = measure_numerics(target, given, sampling, numerics)
    report = audit_distributions(
        teacher_forced_rows(target, given, sampling, draft, draft_sampling or sampling),
        delta=delta,
        seed=seed,
        eos=eos,
        max_new_tokens=max_new_tokens,
        numerics=measured,
        stop=stop,
        detect=detect,
        progress=progress,
        expected=sum(len(text.tokens) for text in given),
    )
    if eos is None and isinstance(target, PreTrainedModel):
        report.notes.extend(_ends_inside(target, given))
    return report


def _ends_inside(target: PreTrainedModel, completions: Sequence[Completion]) -> list[str]:
    """What to say of texts that go on behind the model's own end-of-text, when nobody said that this ends them."""
    own = getattr(target.config, "eos_token_id", None)
    ends = {own} if isinstance(own, int) else set(own or ())
    count = sum(any(token in ends for token in text.tokens[:-1]) for text in completions)
    some = "1 text goes" if count == 1 else f"{count:,} texts go"
    return [f"{some} on behind an end-of-text {sorted(ends)}; give eos if it ends them"] if count else []


def assert_exact(target: Source, completions: Sequence[Sequence[int]], **settings: Any) -> Report:
    """`audit`, for tests: raises `AssertionError` with the report as its message if exactness is rejected."""
    report = audit(target, completions, **({"progress": False} | settings))
    if report.rejected:
        raise AssertionError(str(report))
    return report


def _texts(
    completions: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]] | None,
    starts: Sequence[int] | None,
    steps: Sequence[Sequence[int]] | None,
) -> list[Completion]:
    if (prompts is None) == (starts is None):
        raise ValueError("give either prompts, or starts with texts that hold their prompts: one of the two")
    for name, other in (("prompts", prompts), ("starts", starts), ("steps", steps)):
        if other is not None and len(other) != len(completions):
            raise ValueError(f"there are {len(completions)} texts and {len(other)} {name}; each text has one")
    whole = [[int(token) for token in text] for text in completions]
    if prompts is not None:
        split = [([int(token) for token in prompt], text) for prompt, text in zip(prompts, whole, strict=True)]
    else:
        assert starts is not None
        split = [(text[:start], text[start:]) for text, start in zip(whole, starts, strict=True)]
    parts = [None] * len(whole) if steps is None else [[int(size) for size in row if size != 0] for row in steps]
    given = [Completion(prompt, text, one) for (prompt, text), one in zip(split, parts, strict=True)]
    if not given:
        raise ValueError("there are no tokens to judge; give at least one text with a token in it")
    return given
