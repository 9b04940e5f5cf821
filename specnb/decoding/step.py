"""One step of a batch whose rows all stand somewhere else: tensors of fixed shape, changed in place.

Nothing in a step waits for the device, asks how far a row is, or makes a tensor whose size depends on what
was drawn. What a step needs (texts, noise, how far each row is) and what it leaves (tokens, the record) lies
in tensors that stay where they are. So the same step runs as it stands, is compiled, or is captured once as a
graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.record import CompletedRow
from specnb.drafting.base import Drafter, Proposal
from specnb.models.cached_model import CachedModel, prefill
from specnb.sampling.distributions import Sampling, overlap, standardise
from specnb.sampling.randomness import Uniforms
from specnb.sampling.verification import Outcome, Rule

IDLE = 0  # of `State.room`: nothing more comes
NAN, IMPROPER = -1, -2  # of `State.left`
TOLERANCE = 1e-4
"""How far the sum of a drafter's q may lie from 1; the rounding of a float32 softmax stays below a tenth of it."""


class State:
    """Each row's text, noise and record, and how far it is; `(rows, ...)` throughout.

    tokens   (rows, slots)              the text, prompt included; behind `lengths` it means nothing
    lengths, starts, steps              tokens so far, those of the prompt, steps so far
    room                                tokens still to come: `IDLE` when the row has ended
    sick                                whether a model gave it NaN
    improper                            whether a drafter gave it a q that is no distribution, or no such token
    left                                what the host is told: `room`, or `NAN` when sick, or `IMPROPER`
    noise    (rows, steps, 2 gamma + 1) what each step of the row draws with: drafts, tests, the last token
    drawn    (rows, 2 gamma + 1)        of that, what the next step draws with
    record   (rows, steps, 2 gamma + 3) what each did: drafts, accepted, the last token, emitted, and the overlap
                                        of p and q at each draft
    """

    def __init__(self, rows: int, gamma: int, slots: int, steps: int, ends: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.gamma = gamma
        self.tokens = zeros(slots)
        self.lengths, self.starts, self.remaining, self.steps, self.status = (zeros() for _ in range(5))
        self.has_nan, self.improper = zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        # One more than the steps of the longest text: a row that has ended goes on pointing behind its last.
        self.noise = zeros(steps + 1, 2 * gamma + 1, dtype=torch.float64)
        self.step_uniforms = zeros(2 * gamma + 1, dtype=torch.float64)
        self.record = zeros(steps + 1, 2 * gamma + 3, dtype=torch.float64)
        self.eos = torch.zeros(ends, dtype=torch.int64, device=device)
        self.offsets = torch.arange(gamma + 1, device=device)
        self.rows = torch.arange(rows, device=device)

    def enter(self, rows: Tensor, prompts: Sequence[Sequence[int]], noise: Uniforms, max_new_tokens: int) -> None:
        """New texts in `rows` `(n,)`, each with the noise of a text of its own; the other rows go on."""
        longest = max(map(len, prompts))
        device = self.tokens.device
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        self.tokens[rows, :longest] = padded
        self.lengths[rows] = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.starts[rows] = self.lengths[rows]
        self.remaining[rows], self.steps[rows] = max_new_tokens, 0
        self.has_nan[rows], self.improper[rows] = False, False
        every = torch.cat([noise.draft, noise.accept, noise.final[..., None]], dim=-1)
        self.noise[rows, : every.shape[1]] = every.to(device)
        self.prepare_next_step()

    def prepare_next_step(self) -> None:
        """Lays out what the next step draws with, and what the host is told of this one."""
        self.step_uniforms.copy_(self.noise[self.rows, self.steps])
        self.status.copy_(self.remaining.masked_fill(self.improper, IMPROPER).masked_fill(self.has_nan, NAN))

    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """Puts what a step emits behind each row; returns how many tokens `(rows,)` that was.

        Tokens after an end-of-text, or beyond the number asked for, are not emitted; what is cut off
        at the end of a text changes nothing about the distribution of what stands before.
        """
        last = outcome.token[:, None]
        block = torch.cat([proposal.draft_tokens, last], dim=1).scatter_(1, outcome.accepted[:, None], last)
        emitted = torch.minimum(outcome.accepted + 1, self.remaining)
        if len(self.eos):
            end = torch.where(torch.isin(block, self.eos), self.offsets + 1, self.gamma + 2).amin(dim=1)
            # Where the text ends inside of what is emitted, no room is left behind it.
            self.remaining.copy_(torch.where(end <= emitted, end, self.remaining))
            emitted = torch.minimum(emitted, end)
        # The whole block: what is not emitted lies behind the row's length.
        self.tokens.scatter_(1, self.lengths[:, None] + self.offsets, block)
        self.lengths += emitted
        self.remaining -= emitted
        return emitted

    def remember(self, proposal: Proposal, outcome: Outcome, emitted: Tensor, beta: Tensor) -> None:
        """Writes the step into the record of the rows that were still going on, and counts it."""
        numbers = (outcome.accepted[:, None], outcome.token[:, None], emitted[:, None])
        self.record[self.rows, self.steps] = torch.cat([proposal.draft_tokens, *numbers, beta.double()], dim=1)
        self.steps += emitted > 0

    def completed_rows(self, rows: list[int]) -> list[CompletedRow]:
        """What came of the texts in `rows`, brought to the host at once."""
        index = torch.tensor(rows, device=self.tokens.device)
        own = (self.tokens, self.starts, self.lengths, self.steps, self.record)
        columns = zip(*(tensor[index].cpu().numpy() for tensor in own), strict=True)
        whole = self.gamma + 3  # numbers of a step that are whole ones
        return [
            CompletedRow(tokens[start:end].tolist(), record[:steps, :whole].astype(np.int64), record[:steps, whole:])
            for tokens, start, end, steps, record in columns
        ]


class Batch:
    """Rows that are generated together: their state, their caches, and the three parts of a step."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        sampling: Sampling,
        rule: Rule,
        rows: int,
        gamma: int,
        slots: int,
        steps: int,
        ends: int,
    ) -> None:
        self.drafter = drafter if gamma else None
        self.sampling, self.rule = sampling, rule
        self.vocab = target.config.vocab_size
        self.state = State(rows, gamma, slots, steps, ends, target.device)
        self.runner = CachedModel(target, slots)
        self.cold = True  # nothing has been run yet

    def clear(self, eos: list[int]) -> None:
        """Forgets the texts of before; the new ones end with `eos`. To be called before rows enter."""
        self.runner.clear()
        self.state.eos.copy_(torch.tensor(eos, dtype=torch.int64))

    def enter(self, rows: list[int], prompts: Sequence[Sequence[int]], noise: Uniforms, max_new_tokens: int) -> None:
        """Puts prompts into `rows`, and runs them through both models."""
        state = self.state
        index = torch.tensor(rows, device=state.tokens.device)
        state.enter(index, prompts, noise, max_new_tokens)
        some = None if len(rows) == len(state.rows) else index
        prefill(self.runner, state.tokens, state.lengths, some)
        if self.drafter is not None:
            # A drafter that is never asked to take up single rows need not know of them.
            self.drafter.start(state.tokens, state.lengths, *([] if some is None else [some]))

    def step(self, mark: Callable[[str], None] = lambda part: None) -> None:
        """Draft, verify, emit: one round for every row. `lap` is told the name of each part as it ends."""
        proposal = self.propose(self.state.step_uniforms[:, : self.state.gamma])
        mark("draft")
        logits = self.run_target(proposal.draft_tokens)
        mark("target")
        self.verify_and_emit(logits, *proposal)

    def propose(self, noise: Tensor) -> Proposal:
        """The drafts of a step, from its uniforms `(rows, gamma)`."""
        if self.drafter is None:
            nothing = noise.new_zeros(len(noise), self.state.gamma, self.vocab, dtype=torch.float32)
            return Proposal(self.state.lengths.new_zeros(nothing.shape[:2]), nothing)
        proposal = self.drafter.propose(self.state.tokens, self.state.lengths, noise)
        require_shapes(proposal, len(noise), self.state.gamma, self.vocab)
        return proposal

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        """The target's logits `(rows, gamma + 1, vocab)` at the last token and the drafts."""
        return target_logits(self.runner, self.state, draft_tokens.clamp_max(self.vocab - 1))

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> None:
        """Decides, emits and remembers."""
        if self.drafter is not None:
            draft_tokens = self._checked(draft_tokens, q)
        _, accept, final = self.state.step_uniforms.split([self.state.gamma, self.state.gamma, 1], dim=1)
        p = standardise(logits, self.sampling, check=False)
        proposal = Proposal(draft_tokens, q)
        outcome = self.rule(p, q, draft_tokens, accept, final[:, 0])
        beta = overlap(p[:, :-1], q)
        # A distribution of which one entry is NaN is NaN throughout, and so is its overlap with any other.
        self.state.has_nan |= (p[:, -1, 0] + beta.sum(dim=1)).isnan()
        self.state.remember(proposal, outcome, self.state.append(proposal, outcome), beta)
        self.state.prepare_next_step()

    def _checked(self, draft_tokens: Tensor, q: Tensor) -> Tensor:
        """Marks the rows whose proposal is improper; returns the drafts with tokens that a rule can look up.

        Rows that have ended are not looked at. NaN is not improper: it is found by itself.
        """
        known = draft_tokens.clamp(-1, self.vocab - 1)
        proposed = (draft_tokens >= 0).to(q.dtype)
        wrong = ((q.sum(dim=-1) - proposed).abs() > TOLERANCE) | (q.amin(dim=-1) < 0) | (known != draft_tokens)
        self.state.improper |= wrong.any(dim=1) & (self.state.remaining > IDLE)
        return known

    def warm_up(self, progress: bool) -> None:
        """Runs a text of no meaning: that compiles each part, or captures the step."""
        rows, state = len(self.state.rows), self.state
        self.clear([0] * len(state.eos))
        quiet = torch.zeros(rows, 1, state.gamma, dtype=torch.float64)
        self.enter(list(range(rows)), [[0, 0]] * rows, Uniforms(quiet, quiet, torch.zeros(rows, 1).double()), 1)
        with tqdm(total=3, desc="compiling (half a minute, once)", leave=False, disable=not progress) as bar:
            Batch.step(self, lambda part: bar.update())
            bar.update()
        self.step()  # where the step is captured as a whole, here, on a text that nobody reads
        self.cold = False


def require_shapes(proposal: Proposal, rows: int, gamma: int, vocab: int) -> None:
    """Raises `ValueError` or `TypeError` for tensors of other shapes or types than `Proposal` names."""
    draft_tokens, q = proposal
    if not (isinstance(draft_tokens, Tensor) and isinstance(q, Tensor)):
        raise TypeError(
            f"a drafter proposed {type(draft_tokens).__name__} and {type(q).__name__}; both must be tensors"
        )
    shapes, wanted = (tuple(draft_tokens.shape), tuple(q.shape)), ((rows, gamma), (rows, gamma, vocab))
    if shapes != wanted:
        raise ValueError(f"a drafter proposed drafts and q of the shapes {shapes}; they must be {wanted}")
    if draft_tokens.dtype != torch.int64 or q.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"a drafter proposed {draft_tokens.dtype} and {q.dtype}; drafts are int64, and q float32 or float64"
        )


def target_logits(runner: CachedModel, state: State, draft_tokens: Tensor) -> Tensor:
    """One target run over the last token and the drafts: logits `(rows, gamma + 1, vocab)`."""
    slots = state.lengths[:, None] - 1 + state.offsets
    newest = state.tokens.gather(1, slots[:, :1])
    return runner.run(torch.cat([newest, draft_tokens.clamp_min(0)], dim=1), slots, keep=state.gamma + 1)
