"""One step of a batch: draft, verify, emit, for all rows at once.

Every tensor has a fixed shape and is changed in place. Nothing in a step waits for the device,
reads a length on the host, or makes a tensor whose size depends on what was sampled. All that a
step reads (sequences, uniforms, lengths) and all that it leaves (tokens, the record) lies in
tensors that stay where they are. So the same step runs eagerly, or is captured once as a CUDA graph
and replayed. On a CPU, where reading a number costs nothing, the forward pass that verifies is as
narrow as what was proposed.

The nodes of a tree of draft tokens occupy the slots behind the row, whatever their depth, and one
forward pass verifies them all. Then the cache entries of the accepted path are copied to
consecutive slots, so that the next step finds them as if a chain had been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specnb.cache import CachedModel, prefill
from specnb.check import at_least_float
from specnb.distributions import Sampling, Uniforms, overlap, standardise, uniforms
from specnb.drafters import Context, Drafter, Proposal, no_distribution, nothing, padded
from specnb.fast import Captured
from specnb.record import CompletedRow
from specnb.rules import Outcome, Rule, require_outcome, token_verification
from specnb.support import vocabulary
from specnb.trees import TokenTree

IDLE = 0  # value of `State.remaining` for a row that has ended
NAN, IMPROPER = -1, -2  # values of `State.status` for rows with an error


@dataclass(frozen=True, eq=False)
class Setup:
    """What a batch is made of.

    target      the modules that the loop runs
    drafter     None where nothing is drafted
    gamma       draft tokens of a step; 0 without a drafter
    rows, slots sequences that are generated together, and the cache slots of each
    steps       the most steps of a sequence
    eos         how many tokens end a sequence, at most
    keep_probs  whether the target's distribution of every new token is kept
    log_probs   whether the log-probability of every new token is kept, before temperature and
                filters
    trace       whether p, q and r of every draft token are kept
    two_widths  whether a forward pass on a CPU has the fewest tokens that the drafter proposes or
                gamma, and nothing between them, because passes are compiled
    """

    target: PreTrainedModel
    drafter: Drafter | None
    gamma: int
    rows: int
    slots: int
    steps: int
    sampling: Sampling = field(default_factory=Sampling)
    rule: Rule = token_verification
    eos: int = 0
    keep_probs: bool = False
    log_probs: bool = False
    two_widths: bool = False
    trace: bool = False

    @property
    def probs_dtype(self) -> torch.dtype:
        """The dtype of distributions that are kept."""
        return torch.float64 if self.target.dtype == torch.float64 else torch.float32


class State:
    """The sequence, the uniforms and the record of each row, as tensors `(rows, ...)`.

    tokens                   (rows, slots)              prompt and completion; entries from
                             `lengths` on are meaningless
    lengths, starts, steps   (rows,)                    tokens so far, tokens of the prompt, steps
                             so far
    remaining                (rows,)                    tokens still to emit; `IDLE` for a row that
                             has ended
    has_nan                  (rows,)                    whether a model produced NaN that the row
                             needed
    improper                 (rows,)                    whether a drafter proposed an invalid token
                             or q
    status                   (rows,)                    for the host: `remaining`, or `NAN`, or
                             `IMPROPER`
    uniforms                 (rows, steps, 2 gamma + 1) of each step of a row: drafting, acceptance,
                             final sample
    step_uniforms            (rows, 2 gamma + 1)        of these, those of the next step
    record                   (rows, steps, 2 gamma + 3) of each step: draft tokens, number accepted,
                             final token, number emitted, overlap of p and q at each draft token
    path                     (rows, steps, depth)       nodes accepted in each step, for a tree only
    probs                    (rows, tokens, vocab)      p of each token emitted, if they are kept
    log_probs                (rows, tokens)             the target's log-probability of each token
                             emitted, before temperature and filters, if it is kept
    trace                    (rows, steps, gamma, 3)    p and q of each draft token and the r that it
                             was tested with, if they are kept
    eos                      (n,)                       tokens that end a sequence; -1 for none
    """

    def __init__(self, setup: Setup) -> None:
        rows, gamma, steps, device = setup.rows, setup.gamma, setup.steps, setup.target.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.gamma = gamma
        self.tokens = zeros(setup.slots)
        self.lengths, self.starts, self.remaining, self.steps, self.status = (zeros() for _ in range(5))
        self.has_nan, self.improper = zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        # One more than there can be steps: a row that has ended keeps pointing behind its last one.
        self.uniforms = zeros(steps + 1, 2 * gamma + 1, dtype=torch.float64)
        self.step_uniforms = zeros(2 * gamma + 1, dtype=torch.float64)
        self.record = zeros(steps + 1, 2 * gamma + 3, dtype=torch.float64)
        self.eos = torch.full((setup.eos,), -1, device=device)
        self.offsets = torch.arange(gamma + 1, device=device)
        self.rows = torch.arange(rows, device=device)
        self.path: Tensor | None = None
        # A step writes gamma + 1 distributions from the next token on.
        tokens = steps + gamma + 1
        self.probs = zeros(tokens, vocabulary(setup.target), dtype=setup.probs_dtype) if setup.keep_probs else None
        self.log_probs = zeros(tokens, dtype=torch.float64) if setup.log_probs else None
        self.trace = zeros(steps + 1, gamma, 3, dtype=torch.float64) if setup.trace else None

    def record_path(self, depth: int) -> None:
        """Keeps the nodes of a tree that each step accepts."""
        self.path = self.record.new_zeros(*self.record.shape[:2], depth, dtype=torch.int64)

    def enter(self, rows: Tensor, prompts: Sequence[Sequence[int]], uniforms: Uniforms, max_new_tokens: int) -> None:
        """Starts `prompts` in `rows` `(n,)`, each with uniforms of its own; the other rows go
        on."""
        longest = max(map(len, prompts))
        device = self.tokens.device
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
        self.tokens[rows, :longest] = padded
        self.lengths[rows] = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.starts[rows] = self.lengths[rows]
        self.remaining[rows], self.steps[rows] = max_new_tokens, 0
        self.has_nan[rows], self.improper[rows] = False, False
        every = torch.cat([uniforms.draft, uniforms.accept, uniforms.final[..., None]], dim=-1)
        self.uniforms[rows, : every.shape[1]] = every.to(device)
        self.prepare_next_step()

    def prepare_next_step(self) -> None:
        """Selects the uniforms of the next step, and sets the status of this one."""
        self.step_uniforms.copy_(self.uniforms[self.rows, self.steps])
        self.status.copy_(self.remaining.masked_fill(self.improper, IMPROPER).masked_fill(self.has_nan, NAN))

    def block(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """The tokens `(rows, width + 1)` that a step adds at most: accepted ones, then the final
        one; what follows means nothing."""
        last = outcome.token[:, None]
        return torch.cat([proposal.draft_tokens, last], dim=1).scatter_(1, outcome.accepted[:, None], last)

    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """Appends the accepted tokens and the final one to each row; returns how many `(rows,)`
        were emitted.

        `proposal.draft_tokens` is a chain, or the accepted path of a tree. Tokens after an
        end-of-text token, or beyond `remaining`, are not emitted. Cutting them leaves the
        distribution of the tokens before them as it is.
        """
        block = self.block(proposal, outcome)
        offsets = self.offsets[: block.shape[1]]
        emitted = torch.minimum(outcome.accepted + 1, self.remaining)
        if len(self.eos):
            end = torch.where(torch.isin(block, self.eos), offsets + 1, self.gamma + 2).amin(dim=1)
            # An end-of-text token among those emitted leaves none to emit after it.
            self.remaining.copy_(torch.where(end <= emitted, end, self.remaining))
            emitted = torch.minimum(emitted, end)
        # The whole block is written: what is not emitted lies behind the row's length.
        self.tokens.scatter_(1, self.lengths[:, None] + offsets, block)
        self.lengths += emitted
        self.remaining -= emitted
        return emitted

    def keep(self, kept: Tensor, values: Tensor) -> None:
        """Keeps `values` `(rows, n, ...)` of the next n tokens in `kept`; to be called before they
        are appended."""
        places = (self.lengths - self.starts)[:, None] + self.offsets[: values.shape[1]]
        kept[self.rows[:, None], places] = values.to(kept.dtype)

    def keep_path(self, path: Tensor) -> None:
        """Keeps the nodes `(rows, depth)` that this step accepts; to be called before `remember`
        counts the step."""
        assert self.path is not None
        self.path[self.rows, self.steps] = path

    def keep_trace(self, p: Tensor, proposal: Proposal, r: Tensor) -> None:
        """Keeps p and q `(rows, width, vocab)` at the draft tokens, and r `(rows, width)`; to be called
        before `remember` counts the step."""
        assert self.trace is not None
        tokens = proposal.draft_tokens[..., None]
        chosen = [probs.gather(-1, tokens.clamp_min(0)) for probs in (p, proposal.q)]
        values = torch.cat([*(one.double() for one in chosen), r[..., None]], dim=-1).where(tokens >= 0, torch.nan)
        missing = self.gamma - values.shape[1]
        self.trace[self.rows, self.steps] = pad(values, (0, 0, 0, missing), value=torch.nan)

    def remember(self, proposal: Proposal, outcome: Outcome, emitted: Tensor, beta: Tensor) -> None:
        """Writes the step into the record of the rows that have not ended, and counts it."""
        numbers = (outcome.accepted[:, None], outcome.token[:, None], emitted[:, None])
        draft_tokens, missing = proposal.draft_tokens, self.gamma - beta.shape[1]
        if missing:
            draft_tokens, beta = pad(draft_tokens, (0, missing), value=-1), pad(beta, (0, missing))
        self.record[self.rows, self.steps] = torch.cat([draft_tokens, *numbers, beta.double()], dim=1)
        self.steps += emitted > 0

    def completed_rows(self, rows: list[int]) -> list[CompletedRow]:
        """The completions and records of `rows`, copied to the host at once."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)
        path = self.record[..., :0] if self.path is None else self.path
        own = (self.tokens, self.starts, self.lengths, self.steps, self.record, path)
        columns = zip(*(tensor[index].cpu().numpy() for tensor in own), strict=True)
        whole = self.gamma + 3  # so many columns of the record are integers; the overlaps follow
        return [
            CompletedRow(
                tokens[start:end].tolist(),
                record[:steps, :whole].astype(np.int64),
                record[:steps, whole:],
                path[:steps].astype(np.int64),
                None if self.probs is None else self.probs[row, : end - start].clone(),
                None if self.log_probs is None else self.log_probs[row, : end - start].clone(),
                None if self.trace is None else self.trace[row, :steps].clone().cpu().numpy(),
            )
            for row, (tokens, start, end, steps, record, path) in zip(rows, columns, strict=True)
        ]


class Batch:
    """Rows that are generated together: their state, their caches, and a step.

    Draft tokens form a chain, or the static tree `drafter.parents`. A subclass may be made of other
    parts; `Sampler(hooks=Hooks(batch_class=...))` makes its steps:

    state_class   makes the state
    runner_class  makes the target with its cache

    last  draft tokens and logits of the last step
    """

    state_class: ClassVar[type[State]] = State
    runner_class: type[CachedModel] = CachedModel

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.drafter, self.sampling, self.rule = setup.drafter, setup.sampling, setup.rule
        self.vocab = vocabulary(setup.target)
        self.state = self.state_class(setup)
        parents = None if self.drafter is None else self.drafter.parents
        self.tree = None if parents is None else TokenTree(parents, setup.target.device)
        if self.tree is not None:
            self.state.record_path(self.tree.depth)
        self.runner = self.runner_class(setup.target, setup.slots)
        if self.drafter is not None and self.drafter.hidden_layers:
            self.runner.record_hidden_states(self.drafter.hidden_layers, setup.rows)
        fewest = setup.gamma if self.drafter is None else self.drafter.fewest(setup.gamma)
        self.on_host = setup.target.device.type == "cpu"
        # Draft tokens of a forward pass that verifies; those of this step.
        self.widths = (setup.gamma,) if self.tree is not None or not self.on_host else (fewest, setup.gamma)
        self.width = setup.gamma
        self.draft: Callable[..., Proposal] = self.propose
        self.target: Callable[..., Tensor] = self.run_target
        self.rest: Callable[..., Outcome] = self.verify_and_emit
        self.graph: Captured | None = None
        self.last: tuple[Tensor, Tensor] | None = None
        self.begins = True  # whether the next rows are the first of a call

    def clear(self, eos: Sequence[int]) -> None:
        """Forgets earlier sequences; new ones end with `eos`. To be called before rows enter."""
        self.runner.clear()
        for ended in (self.state.remaining, self.state.has_nan, self.state.improper):
            ended.zero_()
        # A row that stays without a prompt is evaluated, too.
        self.state.tokens.zero_()
        self.state.lengths.fill_(1)
        self.begins = True
        self.state.eos.copy_(torch.tensor([*eos, *[-1] * (len(self.state.eos) - len(eos))], dtype=torch.int64))

    def enter(self, rows: list[int], prompts: Sequence[Sequence[int]], uniforms: Uniforms, max_new_tokens: int) -> None:
        """Starts `prompts` in `rows`: fills the target's cache, then calls `Drafter.start`."""
        state = self.state
        index = torch.tensor(rows, device=state.tokens.device)
        state.enter(index, prompts, uniforms, max_new_tokens)
        some = None if len(rows) == len(state.rows) else index
        self.runner.cache.finite = False  # NaN of a prompt reaches every token
        prefill(self.runner, state.tokens, state.lengths, some)
        if self.drafter is not None:
            self.drafter.start(self.context, None if self.begins else some)
        self.begins = False

    def uniforms(self, seed: int, numbers: Sequence[int], max_new_tokens: int) -> Uniforms:
        """The uniforms of prompts with these `numbers`; see `specnb.distributions.uniforms`."""
        return uniforms(seed, numbers, max_new_tokens, self.state.gamma)

    @property
    def parents(self) -> tuple[int, ...] | None:
        """The tree of draft tokens; None for a chain."""
        return None if self.tree is None else self.tree.parents

    @property
    def context(self) -> Context:
        """What the drafter may look at."""
        return Context(self.state.tokens, self.state.lengths, self.runner.hidden_states)

    def step(self, mark: Callable[[str], None] | None = None) -> None:
        """Draft, verify, emit: one round for every row. `mark`, if given, is called with the name of
        each part as it ends."""
        self.last = self.graph() if self.graph is not None and mark is None else self.in_parts(mark)

    def in_parts(self, mark: Callable[[str], None] | None = None) -> tuple[Tensor, Tensor]:
        """A step; returns its draft tokens and logits."""
        told, going = mark or (lambda part: None), self.state.remaining > IDLE
        draft_tokens, q = self.draft(self.state.step_uniforms[:, : self.state.gamma])
        told("draft")
        logits = self.target(draft_tokens)
        if self.on_host and not self.runner.cache.finite and bool((logits[..., 0].isnan().any(1) & going).any()):
            # That of one draft token has reached all others; it may have been rejected.
            self.runner.cache.finite = True
            logits = self.target(draft_tokens)
        told("target")
        outcome = self.rest(logits, draft_tokens, q)
        if self.drafter is not None:
            self.drafter.update(self.context, outcome)
        return draft_tokens, logits

    def propose(self, uniforms: Tensor) -> Proposal:
        """The draft tokens of a step, from its uniforms `(rows, gamma)`; on a CPU the pass is no
        wider than they are."""
        if self.drafter is None:
            return nothing(self.state.lengths, self.vocab)
        proposal = self.drafter.propose(self.context, uniforms)
        require_shapes(proposal, len(uniforms), self.state.gamma, self.vocab, shorter=self.tree is None)
        draft_tokens, q = proposal
        self.width = self.state.gamma
        if len(self.widths) > 1:
            # Up to the last position at which some row proposes something.
            used = ((draft_tokens != -1) | (q.sum(dim=-1) != 0)).any(dim=0)
            width = int((used * self.state.offsets[1 : len(used) + 1]).amax()) if len(used) else 0
            self.width = min(n for n in self.widths if n >= width) if self.setup.two_widths else width
            draft_tokens, q = draft_tokens[:, :width], q[:, :width]
        return padded(draft_tokens, q, self.width)

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        """The target's logits `(rows, width + 1, vocab)` at the newest token and at each draft
        token."""
        first = self.state.lengths - 1
        slots = first[:, None] + self.state.offsets[: draft_tokens.shape[1] + 1]
        newest = self.state.tokens.gather(1, slots[:, :1])
        entries = torch.cat([newest, draft_tokens.clamp(0, self.vocab - 1)], dim=1)
        keep, seen = entries.shape[1], self.runner.cache.least(slots)
        if self.tree is None:
            return self.runner.run(entries, slots, keep=keep, seen=seen)
        positions, visible = self.tree.positions(first), self.tree.visible(first, seen)
        return self.runner.run(entries, slots, keep=keep, positions=positions, visible=visible, seen=seen)

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> Outcome:
        """Applies the rule, appends what it accepts, and records the step."""
        state = self.state
        # Verify.
        if q.shape[1]:
            draft_tokens = self.checked(draft_tokens, q)
        p = standardise(logits, self.sampling, check=False)
        shape = () if self.tree is None else (self.tree,)
        accept_uniforms, final_uniform = self.verification_uniforms()
        outcome = self.rule(p, q, draft_tokens, accept_uniforms, final_uniform, *shape)
        require_outcome(outcome, len(p), with_path=self.tree is not None)
        p_of_drafts = p[:, :-1] if self.tree is None else p[:, self.tree.parent_entries]
        beta = overlap(p_of_drafts, q)
        if state.trace is not None:
            state.keep_trace(p_of_drafts, Proposal(draft_tokens, q), accept_uniforms)

        # Of a tree, the accepted path is moved to where a chain lies.
        chain = Proposal(draft_tokens, q)
        if outcome.path is not None:
            p, logits, chain = self.made_a_chain(outcome.path, p, logits, chain)

        # Emit.
        if state.probs is not None:
            state.keep(state.probs, p)
        if state.log_probs is not None:
            raw = at_least_float(logits)
            of_tokens = raw.gather(-1, state.block(chain, outcome).clamp(0, self.vocab - 1)[..., None])[..., 0]
            state.keep(state.log_probs, of_tokens - raw.logsumexp(dim=-1))
        emitted = state.append(chain, outcome)
        state.remember(Proposal(draft_tokens, q), outcome, emitted, beta)
        self.mark_nan(p, q, emitted)
        state.prepare_next_step()
        return outcome

    def mark_nan(self, p: Tensor, q: Tensor, emitted: Tensor) -> None:
        """Marks rows whose emitted tokens rest on NaN."""
        # A distribution with a NaN is NaN throughout.
        needed = self.state.offsets[: p.shape[1]] < emitted[:, None]
        of_p, of_q = p[..., 0].isnan(), q.sum(dim=-1).isnan()
        of_q = of_q & (needed[:, : q.shape[1]] if self.tree is None else (emitted > 0)[:, None])
        self.state.has_nan |= (of_p & needed).any(dim=1) | of_q.any(dim=1)

    def made_a_chain(
        self, path: Tensor, p: Tensor, logits: Tensor, proposal: Proposal
    ) -> tuple[Tensor, Tensor, Proposal]:
        """Copies the accepted path of a tree to where a chain lies: in the cache, in p, in the logits
        and in the draft tokens."""
        self.state.keep_path(path)
        # Entries after the last accepted node are -1. What they select lies behind the row's new
        # length.
        root, nodes = torch.zeros_like(path[:, :1]), path.clamp_min(0)
        first = self.state.lengths[:, None]
        self.runner.move(first + nodes, first + self.state.offsets[: path.shape[1]])
        entries = torch.cat([root, path + 1], dim=1)[..., None]
        kept = logits if self.state.log_probs is None else logits.take_along_dim(entries, dim=1)
        return p.take_along_dim(entries, dim=1), kept, Proposal(proposal.draft_tokens.gather(1, nodes), proposal.q)

    def verification_uniforms(self) -> tuple[Tensor, Tensor]:
        """The uniforms of this step's rule: `(rows, width)` for acceptance, `(rows,)` for the final
        sample."""
        gamma = self.state.gamma
        _, accept, final = self.state.step_uniforms.split([gamma, gamma, 1], dim=1)
        return accept[:, : self.width], final[:, 0]

    def checked(self, draft_tokens: Tensor, q: Tensor) -> Tensor:
        """Marks the rows with an improper proposal; returns the draft tokens, clamped so that a
        rule can index by them.

        Rows that have ended are not checked. NaN is not marked here.
        """
        known = draft_tokens.clamp(-1, self.vocab - 1)
        wrong = no_distribution(Proposal(draft_tokens, q)) | (known != draft_tokens)
        # A token whose q is 0 was not sampled from q, and a rule would accept it with certainty.
        wrong |= (known >= 0) & (q.gather(-1, known.clamp_min(0)[..., None])[..., 0] == 0)
        self.state.improper |= wrong.any(dim=1) & (self.state.remaining > IDLE)
        return known

    def capture(self, in_parts: bool) -> None:
        """Captures the whole step as a CUDA graph, or its parts if they are timed or the drafter
        cannot be captured."""
        capturable = self.drafter is None or self.drafter.capturable
        if capturable and not in_parts:
            self.graph = Captured(self.in_parts)
        else:
            if capturable and self.drafter is not None:
                self.draft = Captured(self.draft)
            self.target, self.rest = Captured(self.target), Captured(self.rest)

    def warm_up(self) -> None:
        """Makes steps on a meaningless sequence: they compile each width of a pass, or capture the
        step. No sequence may be in the batch."""
        rows, state = len(self.state.rows), self.state
        self.clear([])
        zeros = torch.zeros(rows, 1, state.gamma, dtype=torch.float64)
        self.enter(list(range(rows)), [[0, 0]] * rows, Uniforms(zeros, zeros, torch.zeros(rows, 1).double()), 1)
        if self.setup.target.device.type == "cpu":
            for width in self.widths:
                self.target(torch.zeros(rows, width, dtype=torch.int64))
        self.step()


def require_shapes(proposal: Proposal, rows: int, gamma: int, vocab: int, shorter: bool = False) -> None:
    """Raises `TypeError` unless shapes and dtypes are those of `Proposal`, with fewer positions if
    `shorter`.

    >>> require_shapes(Proposal(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 5)), rows=2, gamma=3, vocab=5)
    """
    draft_tokens, q = proposal
    width = min(gamma, draft_tokens.shape[-1]) if shorter else gamma
    right_shapes = draft_tokens.shape == (rows, width) and q.shape == (rows, width, vocab)
    if not right_shapes or draft_tokens.dtype != torch.int64 or q.dtype not in (torch.float32, torch.float64):
        given = [(tuple(one.shape), one.dtype) for one in (draft_tokens, q)]
        raise TypeError(
            f"a drafter proposed draft_tokens and q {given}; they must be int64 {(rows, gamma)} and float32 or float64 "
            f"{(rows, gamma, vocab)}"
        )
