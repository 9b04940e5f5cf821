"""One step of a batch: draft, verify, emit, for all rows at once.

All tensors have fixed shapes and are changed in place, and nothing waits for the device, so that a
step can be captured as a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specnb.cache import CachedModel, LengthBound, cache_bytes, decoder_config, free_memory, prefill, readable
from specnb.distributions import Sampling, Uniforms, at_least_float, draw_uniforms, overlap, standardise
from specnb.drafters import Context, Drafter, Proposal, no_distribution, nothing, padded
from specnb.fast import Captured
from specnb.record import CompletedRow
from specnb.rules import Outcome, PlannedRule, Rule, require_outcome, token_verification
from specnb.support import vocabulary
from specnb.trees import TokenTree

IDLE = 0  # value of `State.remaining` for a row that has ended
IMPROPER, NAN_IN_Q, NAN_IN_P = -1, -2, -3  # values of `State.status` for rows with an error
GB = 1e9


@dataclass(frozen=True, eq=False)
class Setup:
    """The parts and sizes of a batch.

    Attributes
    ----------
    target, drafter, gamma
        The modules that the loop runs; without a drafter gamma is 0.
    max_rows, slots, max_steps, max_eos
        At most so many sequences, cache slots and steps of each, and end tokens.
    keep_probs, log_probs, trace
        What to keep in `State`; log-probabilities are those before temperature and filters.
    """

    target: PreTrainedModel
    drafter: Drafter | None
    gamma: int
    max_rows: int
    slots: int
    max_steps: int
    sampling: Sampling = field(default_factory=Sampling)
    rule: Rule = token_verification
    max_eos: int = 0
    keep_probs: bool = False
    log_probs: bool = False
    trace: bool = False

    @property
    def probs_dtype(self) -> torch.dtype:
        return torch.float64 if self.target.dtype == torch.float64 else torch.float32


class State:
    """The sequence, the uniforms and the record of each row, as tensors `(rows, ...)`.

    Attributes
    ----------
    tokens : (rows, slots)
        Prompt and completion; entries from `lengths` on mean nothing.
    lengths, starts, steps, remaining : (rows,)
        Tokens so far, tokens of the prompt, steps so far, tokens still to emit (`IDLE`: ended).
    fault, status : (rows,)
        0, `IMPROPER` for an invalid proposal or an accepted token of -1, or `NAN_IN_Q` or `NAN_IN_P` if a
        token rests on NaN; the fault, or `remaining` without one.
    uniforms : (rows, steps, 2 gamma + 1)
        For drafting, acceptance and the final sample; `step_uniforms` are the next step's.
    record : (rows, steps, 2 gamma + 3)
        Draft tokens, number accepted, final token, number emitted, overlaps of p and q.
    path : (rows, steps, depth)
        Accepted nodes of a tree.
    probs, log_probs, trace : (rows, tokens, vocab), (rows, tokens), (rows, steps, gamma, 3)
        Of each emitted token; p and q of each draft token, and the r that it was tested with.
    """

    def __init__(self, setup: Setup) -> None:
        rows, gamma, steps, device = setup.max_rows, setup.gamma, setup.max_steps, setup.target.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.gamma = gamma
        self.tokens = zeros(setup.slots)
        self.lengths, self.starts, self.remaining, self.steps, self.fault, self.status = (zeros() for _ in range(6))
        # One more: a row that has ended points past its last step.
        self.uniforms = zeros(steps + 1, 2 * gamma + 1, dtype=torch.float64)
        self.step_uniforms = zeros(2 * gamma + 1, dtype=torch.float64)
        self.record = zeros(steps + 1, 2 * gamma + 3, dtype=torch.float64)
        self.eos = torch.full((setup.max_eos,), -1, device=device)
        self.offsets = torch.arange(gamma + 1, device=device)
        self.rows = torch.arange(rows, device=device)
        self.path = zeros(steps + 1, 0)  # of a tree, as wide as it is deep
        # A step writes gamma + 1 places from the next token on.
        tokens = steps + gamma + 1
        self.probs = zeros(tokens, vocabulary(setup.target), dtype=setup.probs_dtype) if setup.keep_probs else None
        self.log_probs = zeros(tokens, dtype=torch.float64) if setup.log_probs else None
        self.trace = zeros(steps + 1, gamma, 3, dtype=torch.float64) if setup.trace else None

    def enter(self, rows: Tensor, prompts: Sequence[Sequence[int]], uniforms: Uniforms, max_new_tokens: int) -> None:
        tokens, lengths = side_by_side(prompts, self.tokens.device)
        self.tokens[rows, : tokens.shape[1]] = tokens
        self.lengths[rows] = self.starts[rows] = lengths
        self.remaining[rows], self.steps[rows], self.fault[rows] = max_new_tokens, 0, 0
        every = torch.cat([uniforms.draft, uniforms.accept, uniforms.final[..., None]], dim=-1)
        self.uniforms[rows, : every.shape[1]] = every.to(tokens.device)
        self.prepare_next_step()

    def prepare_next_step(self) -> None:
        self.step_uniforms.copy_(self.uniforms[self.rows, self.steps])
        self.status.copy_(self.fault.where(self.fault < 0, self.remaining))

    def block(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """Tokens `(rows, width + 1)` that a step may emit: the accepted ones, then the final one."""
        last = outcome.token[:, None]
        return torch.cat([proposal.draft_tokens, last], dim=1).scatter_(1, outcome.accepted[:, None], last)

    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """Append the accepted tokens and the final one to each row, up to an end token or `remaining`; return how many
        `(rows,)` were emitted."""
        block = self.block(proposal, outcome)
        offsets = self.offsets[: block.shape[1]]
        emitted = torch.minimum(outcome.accepted + 1, self.remaining)
        self.remaining -= emitted
        if len(self.eos):
            end = torch.where(torch.isin(block, self.eos), offsets + 1, self.gamma + 2).amin(dim=1)
            self.remaining.masked_fill_(end <= emitted, IDLE)
            emitted = torch.minimum(emitted, end)
        # The whole block is written; tokens that are not emitted lie beyond the row's length.
        self.tokens.scatter_(1, self.lengths[:, None] + offsets, block)
        self.lengths += emitted
        return emitted

    def keep(self, kept: Tensor, values: Tensor) -> None:
        places = (self.lengths - self.starts)[:, None] + self.offsets[: values.shape[1]]
        kept[self.rows[:, None], places] = values.to(kept.dtype)

    def keep_trace(self, p: Tensor, proposal: Proposal, r: Tensor) -> None:
        """Keep p and q `(rows, width, vocab)` at the draft tokens, and r `(rows, width)`."""
        assert self.trace is not None
        tokens = proposal.draft_tokens[..., None]
        chosen = [probs.gather(-1, tokens.clamp_min(0)) for probs in (p, proposal.q)]
        values = torch.cat([*(one.double() for one in chosen), r[..., None]], dim=-1).where(tokens >= 0, torch.nan)
        missing = self.gamma - values.shape[1]
        self.trace[self.rows, self.steps] = pad(values, (0, 0, 0, missing), value=torch.nan)

    def remember(self, proposal: Proposal, outcome: Outcome, emitted: Tensor, beta: Tensor) -> None:
        numbers = (outcome.accepted[:, None], outcome.token[:, None], emitted[:, None])
        draft_tokens, missing = proposal.draft_tokens, self.gamma - beta.shape[1]
        if missing:
            draft_tokens, beta = pad(draft_tokens, (0, missing), value=-1), pad(beta, (0, missing))
        self.record[self.rows, self.steps] = torch.cat([draft_tokens, *numbers, beta.double()], dim=1)
        self.steps += emitted > 0

    def completed_rows(self, rows: list[int]) -> list[CompletedRow]:
        index = torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)
        parts = (self.tokens, self.starts, self.lengths, self.steps, self.record, self.path)
        columns = zip(*(tensor[index].cpu().numpy() for tensor in parts), strict=True)
        integers = self.gamma + 3  # columns of the record before the overlaps
        return [
            CompletedRow(
                tokens[start:end].tolist(),
                record[:steps, :integers].astype(np.int64),
                record[:steps, integers:],
                path[:steps].astype(np.int64),
                None if self.probs is None else self.probs[row, : end - start].clone(),
                None if self.log_probs is None else self.log_probs[row, : end - start].clone(),
                None if self.trace is None else self.trace[row, :steps].clone().cpu().numpy(),
            )
            for row, (tokens, start, end, steps, record, path) in zip(rows, columns, strict=True)
        ]


class Batch:
    """Rows that are generated together: their state, their caches, and a step."""

    state_class: ClassVar[type[State]] = State
    runner_class: type[CachedModel] = CachedModel

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.drafter, self.sampling, self.rule = setup.drafter, setup.sampling, setup.rule
        self.vocab = vocabulary(setup.target)
        self.state = self.state_class(setup)
        self.parents = None if self.drafter is None else self.drafter.parents
        self.tree = None if self.parents is None else TokenTree(self.parents, setup.target.device)
        if self.tree is not None:
            self.state.path = self.state.path.new_zeros(*self.state.path.shape[:2], self.tree.depth)
        self.runner = self.runner_class(setup.target, setup.slots)
        if self.drafter is not None and self.drafter.hidden_layers:
            self.runner.record_hidden_states(self.drafter.hidden_layers, setup.max_rows)
        self.on_host = setup.target.device.type == "cpu"
        # On a CPU a pass is as wide as the proposal.
        self.cuts = self.on_host and self.tree is None
        fewer = self.drafter.lengths(setup.gamma) if self.cuts and self.drafter is not None else ()
        self.widths = sorted({*fewer, setup.gamma})
        self.captured: dict[str, Captured] = {}  # methods that make a step, or its parts
        self.last: tuple[Tensor, Tensor] | None = None
        self.bound = LengthBound(setup.slots, setup.gamma)
        self.begins = True  # whether the next rows are the first of a call

    def clear(self, eos: Sequence[int]) -> None:
        """Forget all sequences; new ones end with `eos`."""
        self.runner.clear()
        for ended in (self.state.remaining, self.state.fault):
            ended.zero_()
        # Rows without a prompt are evaluated, too, so they need a token.
        self.state.tokens.zero_()
        self.state.lengths.fill_(1)
        self.state.starts.fill_(1)
        self.begins = True
        self.bound.begin()
        self.state.eos.copy_(torch.tensor([*eos, *[-1] * (len(self.state.eos) - len(eos))], dtype=torch.int64))

    def enter(self, rows: list[int], prompts: Sequence[Sequence[int]], uniforms: Uniforms, max_new_tokens: int) -> None:
        """Start `prompts` in `rows`."""
        state = self.state
        index = torch.tensor(rows, device=state.tokens.device)
        state.enter(index, prompts, uniforms, max_new_tokens)
        self.bound.enter(map(len, prompts))
        some = None if len(rows) == len(state.rows) else index
        if some is None and not self.begins:
            self.runner.clear()  # an idle step may have left NaN
        self.runner.cache.keep_finite = False  # NaN of a prompt reaches every token
        prefill(self.runner, state.tokens, state.lengths, some)
        if self.drafter is not None:
            self.drafter.start(self.context, None if self.begins else some)
        self.begins = False

    def uniforms_of(self, seed: int, numbers: Sequence[int], max_new_tokens: int) -> Uniforms:
        return draw_uniforms(seed, numbers, max_new_tokens, self.state.gamma)

    @property
    def context(self) -> Context:
        return Context(self.state.tokens, self.state.lengths, self.runner.hidden_states, self.bound)

    def step(self, mark: Callable[[str], None] | None = None) -> None:
        """Draft, verify, emit; `mark` is called with the name of each part as it ends."""
        self.bound.step()
        self.last = self.part("in_parts")() if mark is None else self.in_parts(mark)

    def part(self, name: str) -> Callable[..., Any]:
        """The method `name`, captured or not."""
        return self.captured.get(name) or getattr(self, name)

    def in_parts(self, mark: Callable[[str], None] | None = None) -> tuple[Tensor, Tensor]:
        mark, going = mark or (lambda part: None), self.state.remaining > IDLE
        draft_tokens, q = self.part("propose")(self.state.step_uniforms[:, : self.state.gamma])
        mark("draft")
        logits = self.part("run_target")(draft_tokens)
        if self.on_host and not self.runner.cache.keep_finite and bool((logits[..., 0].isnan().any(1) & going).any()):
            # The NaN of a draft token, which may be rejected, has reached the tokens before it.
            self.runner.cache.keep_finite = True
            logits = self.part("run_target")(draft_tokens)
        mark("target")
        outcome = self.part("verify_and_emit")(logits, draft_tokens, q)
        if self.drafter is not None:
            self.drafter.update(self.context, outcome)
        return draft_tokens, logits

    def propose(self, uniforms: Tensor) -> Proposal:
        """Draft tokens from `uniforms` `(rows, gamma)`, on a CPU as wide as the proposal."""
        if self.drafter is None:
            return nothing(self.state.lengths, self.vocab)
        proposal = self.drafter.propose(self.context, uniforms)
        require_shapes(proposal, len(uniforms), self.state.gamma, self.vocab, shorter=self.tree is None)
        draft_tokens, q = proposal
        if not self.cuts:
            return padded(draft_tokens, q, self.state.gamma)
        # The last position at which some row proposes a token.
        used = ((draft_tokens != -1) | (q.sum(dim=-1) != 0)).any(dim=0)
        width = int((used * self.state.offsets[1 : len(used) + 1]).amax()) if len(used) else 0
        return Proposal(draft_tokens[:, :width], q[:, :width])

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        """The target's logits `(rows, width + 1, vocab)` after the newest token and each draft token."""
        first = self.state.lengths - 1
        slots = first[:, None] + self.state.offsets[: draft_tokens.shape[1] + 1]
        newest = self.state.tokens.gather(1, slots[:, :1])
        entries = torch.cat([newest, draft_tokens.clamp(0, self.vocab - 1)], dim=1)
        keep, seen = entries.shape[1], self.runner.cache.least(slots, bound=self.bound)
        if self.tree is None:
            return self.runner.run(entries, slots, keep=keep, seen=seen)
        positions, visible = self.tree.positions(first), self.tree.visible(first, seen)
        return self.runner.run(entries, slots, keep=keep, positions=positions, visible=visible, seen=seen)

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> Outcome:
        state = self.state
        # Verify.
        if q.shape[1]:
            draft_tokens = self.valid_tokens(draft_tokens, q)
        proposal = chain = Proposal(draft_tokens, q)
        p = standardise(logits, self.sampling, check=False)
        shape = () if self.tree is None else (self.tree,)
        _, accept_uniforms, final_uniform = state.step_uniforms.split([state.gamma, state.gamma, 1], dim=1)
        accept_uniforms = accept_uniforms[:, : q.shape[1]]
        outcome = self.rule(p, q, draft_tokens, accept_uniforms, final_uniform[:, 0], *shape)
        require_outcome(outcome, len(p), self.tree)
        p_of_drafts = p[:, :-1] if self.tree is None else p[:, self.tree.parent_entries]
        beta = overlap(p_of_drafts, q)
        if state.trace is not None:
            state.keep_trace(p_of_drafts, proposal, accept_uniforms)

        # The accepted path of a tree takes the place of a chain.
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
        if not isinstance(self.rule, PlannedRule):  # which accepts no token of -1
            block = state.block(chain, outcome)
            missing = (block < 0) & (state.offsets[: block.shape[1]] < emitted[:, None])
            state.fault.masked_fill_(missing.any(dim=1), IMPROPER)
        state.remember(proposal, outcome, emitted, beta)
        self.mark_nan(p, q, emitted)
        state.prepare_next_step()
        return outcome

    def mark_nan(self, p: Tensor, q: Tensor, emitted: Tensor) -> None:
        # A distribution with one NaN is NaN throughout.
        needed = self.state.offsets[: p.shape[1]] < emitted[:, None]
        of_p, of_q = p[..., 0].isnan(), q.sum(dim=-1).isnan()
        of_q = of_q & (needed[:, : q.shape[1]] if self.tree is None else (emitted > 0)[:, None])
        for fault, found in ((NAN_IN_Q, of_q), (NAN_IN_P, of_p & needed)):
            self.state.fault.masked_fill_(found.any(dim=1), fault)

    def made_a_chain(
        self, path: Tensor, p: Tensor, logits: Tensor, proposal: Proposal
    ) -> tuple[Tensor, Tensor, Proposal]:
        """What lies along the accepted path of a tree, whose cache entries are moved."""
        self.state.path[self.state.rows, self.state.steps] = path
        # Places after the accepted path read anything; they lie beyond the new length.
        root, nodes = torch.zeros_like(path[:, :1]), path.clamp_min(0)
        first = self.state.lengths[:, None]
        self.runner.move(first + nodes, first + self.state.offsets[: path.shape[1]])
        entries = torch.cat([root, path + 1], dim=1)[..., None]
        kept = logits if self.state.log_probs is None else logits.take_along_dim(entries, dim=1)
        return p.take_along_dim(entries, dim=1), kept, Proposal(proposal.draft_tokens.gather(1, nodes), proposal.q)

    def valid_tokens(self, draft_tokens: Tensor, q: Tensor) -> Tensor:
        """Mark rows with an invalid proposal, NaN aside; return draft tokens of the vocabulary, or -1."""
        known = draft_tokens.clamp(-1, self.vocab - 1)
        wrong = no_distribution(Proposal(draft_tokens, q)) | (known != draft_tokens)
        # A token whose q is 0 was not sampled from q, and a rule would accept it with certainty.
        wrong |= (known >= 0) & (q.gather(-1, known.clamp_min(0)[..., None])[..., 0] == 0)
        self.state.fault.masked_fill_(wrong.any(dim=1) & (self.state.remaining > IDLE), IMPROPER)
        return known

    def capture(self, timed: bool) -> None:
        """Capture the step as a graph, or, if it is `timed` or its drafter cannot be captured, its parts."""
        capturable = self.drafter is None or self.drafter.capturable
        parts = ["run_target", "verify_and_emit"]
        if capturable:
            parts = ["in_parts"] if not timed else parts if self.drafter is None else ["propose", *parts]
        own = weakref.proxy(self)  # else the batch and its graphs would keep each other
        for name in parts:
            self.captured[name] = Captured(lambda *given, name=name: getattr(own, name)(*given), lambda: own.bound.seen)

    def warm_up(self) -> None:
        """Make steps on meaningless sequences, so that layers are compiled or steps captured.

        Their tokens differ, because attention to equal ones would give the same with other positions.
        """
        rows, state = len(self.state.rows), self.state
        self.clear([])
        zeros = torch.zeros(rows, 1, state.gamma, dtype=torch.float64)
        self.enter(
            list(range(rows)), [[0, 1 % self.vocab]] * rows, Uniforms(zeros, zeros, torch.zeros(rows, 1).double()), 1
        )
        if self.on_host:
            for width in self.widths:
                self.part("run_target")((torch.arange(width) % self.vocab).repeat(rows, 1))
        for size in (self.setup.slots,) if self.on_host else readable(self.setup.slots):
            self.bound.begin()
            self.bound.enter([size - state.gamma])
            self.step()

    def probe(self, tokens: Tensor) -> Tensor:
        """The logits of a step in rows that begin as `tokens` `(2, n)`; to be called before `clear`."""
        state = self.state
        # A token that sees no other would hide what attention does.
        length = 1 if state.gamma else min(tokens.shape[1], self.setup.slots)
        wanted = torch.arange(length + state.gamma) % tokens.shape[1]
        entries = tokens[(state.rows % len(tokens)).cpu()][:, wanted].to(state.tokens.device)
        state.lengths.fill_(length)
        state.tokens[:, :length] = entries[:, :length]
        self.bound.begin()
        self.bound.enter([length])
        self.bound.step()
        self.runner.cache.keep_finite = False
        prefill(self.runner, state.tokens, state.lengths)
        return self.part("run_target")(entries[:, length:].contiguous())  # type: ignore[no-any-return]


def side_by_side(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens `(rows, longest)`, padded with 0 at the end, and their numbers `(rows,)`."""
    longest = max(map(len, lists))
    tokens = torch.tensor([[*one, *[0] * (longest - len(one))] for one in lists], device=device)
    return tokens, torch.tensor([len(one) for one in lists], device=device)


def require_shapes(proposal: Proposal, rows: int, gamma: int, vocab: int, shorter: bool = False) -> None:
    draft_tokens, q = proposal
    width = min(gamma, draft_tokens.shape[-1]) if shorter else gamma
    right_shapes = draft_tokens.shape == (rows, width) and q.shape == (rows, width, vocab)
    if not right_shapes or draft_tokens.dtype != torch.int64 or q.dtype not in (torch.float32, torch.float64):
        proposed = [(tuple(part.shape), part.dtype) for part in (draft_tokens, q)]
        wanted = f"int64 {(rows, gamma)} and float32 or float64 {(rows, gamma, vocab)}"
        raise TypeError(f"a drafter proposed draft_tokens and q {proposed}; they must be {wanted}")


def require_memory(setup: Setup) -> None:
    """Raise `MemoryError`, naming a batch size that fits, if caches and state need more memory than is free."""
    target, drafter, slots = setup.target, setup.drafter, setup.slots
    row = slots * cache_bytes(target) + 8 * (slots + (setup.max_steps + 1) * (4 * setup.gamma + 4))
    if drafter is not None:
        row += slots * len(drafter.hidden_layers) * decoder_config(target).hidden_size * target.dtype.itemsize
        row += slots * cache_bytes(drafter.draft_model) if drafter.draft_model is not None else 0
    row += 8 * (setup.max_steps + 1) * 3 * setup.gamma * setup.trace
    if setup.keep_probs:
        row += (setup.max_steps + setup.gamma + 1) * vocabulary(target) * setup.probs_dtype.itemsize
    fitting = free_memory(target.device) // row
    advice = f"batch_size={fitting} would fit" if fitting else "not even one row fits; ask for fewer tokens"
    require_free(target.device, setup.max_rows * row, f"{setup.max_rows} rows", advice)


def require_free(device: torch.device, needed: int, what: str, advice: str) -> None:
    """Raise `MemoryError`, with `advice`, if `what` needs more bytes than are free."""
    free = free_memory(device)
    if needed > free:
        raise MemoryError(
            f"{what} need {needed / GB:.3g} GB for caches and state, and {device} has {free / GB:.3g} GB left: {advice}"
        )


class ProgressReader:
    """Reads `State.status`: on a CPU at once, on a GPU one step late, so that the host does not wait."""

    def __init__(self, batch: Batch) -> None:
        self.state = batch.state
        self.ahead = batch.state.tokens.is_cuda
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None
        self.new: list[int] = []  # rows whose pending status is that of their previous sequence

    def read(self) -> list[int] | None:
        if not self.ahead:
            return self.state.status.tolist()
        before, status = self.pending, self.state.status
        copy = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        copy.copy_(status, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.pending = (copy, done)
        if before is None:
            return None
        before[1].synchronize()
        status_of_rows: list[int] = before[0].tolist()
        for row in self.new:
            status_of_rows[row] = 1  # its new sequence has just begun
        self.new = []
        return status_of_rows
