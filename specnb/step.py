"""One step of a batch: draft, verify, emit, for all rows at once.

Every tensor has a fixed shape and is changed in place. Nothing in a step waits for the device,
reads a length on the host, or makes a tensor whose size depends on what was sampled. All that a
step reads (sequences, uniforms, lengths) and all that it leaves (tokens, the record) lies in
tensors that stay where they are. So the same step runs eagerly, is compiled, or is captured once as
a CUDA graph and replayed.

The nodes of a tree of draft tokens occupy the slots behind the row, whatever their depth, and one
forward pass verifies them all. Then the cache entries of the accepted path are copied to
consecutive slots, so that the next step finds them as if a chain had been accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from specnb.cache import CachedModel, prefill
from specnb.decoding.auto_gamma import AutoGamma, widths
from specnb.distributions import Uniforms, overlap, standardise, uniforms
from specnb.drafters import Context, Drafter, Proposal, no_distribution, nothing, padded
from specnb.record import CompletedRow
from specnb.rules import Outcome, Rule, require_outcome
from specnb.sampler import Request
from specnb.support import vocabulary
from specnb.trees import TokenTree

IDLE = 0  # value of `State.remaining` for a row that has ended
NAN, IMPROPER = -1, -2  # values of `State.status` for rows with an error


class State:
    """The sequence, the uniforms and the record of each row, as tensors `(rows, ...)`.

    tokens                   (rows, slots)              prompt and completion; entries from
                             `lengths` on are meaningless
    lengths, starts, steps   (rows,)                    tokens so far, tokens of the prompt, steps
                             so far
    remaining                (rows,)                    tokens still to emit; `IDLE` for a row that
                             has ended
    has_nan                  (rows,)                    whether a model produced NaN
    improper                 (rows,)                    whether a drafter proposed an invalid token
                             or q
    status                   (rows, 3)                  for the host: `remaining`, or `NAN`, or
                             `IMPROPER`; and of the
                                                        last step, if that is learnt from, how many
                                                        tokens were drafted, and how many accepted
    uniforms                 (rows, steps, 2 gamma + 1) of each step of a row: drafting, acceptance,
                             final sample
    step_uniforms            (rows, 2 gamma + 1)        of these, those of the next step
    record                   (rows, steps, 2 gamma + 3) of each step: draft tokens, number accepted,
                             final token,
                                                        number emitted, overlap of p and q at each
                                                        draft token
    path                     (rows, steps, depth)       nodes accepted in each step, for a tree only
    probs                    (rows, tokens, vocab)      p of each token emitted, if they are kept
    """

    def __init__(self, request: Request) -> None:
        rows, gamma, steps, device = request.rows, request.gamma, request.steps, request.target.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.gamma = gamma
        self.tokens = zeros(request.slots)
        self.lengths, self.starts, self.remaining, self.steps = (zeros() for _ in range(4))
        self.status = zeros(3)
        self.has_nan, self.improper = zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        # One more than there can be steps: a row that has ended keeps pointing behind its last
        # step.
        self.uniforms = zeros(steps + 1, 2 * gamma + 1, dtype=torch.float64)
        self.step_uniforms = zeros(2 * gamma + 1, dtype=torch.float64)
        self.record = zeros(steps + 1, 2 * gamma + 3, dtype=torch.float64)
        self.eos = torch.zeros(len(request.eos), dtype=torch.int64, device=device)
        self.offsets = torch.arange(gamma + 1, device=device)
        self.rows = torch.arange(rows, device=device)
        self.path: Tensor | None = None
        self.probs: Tensor | None = None
        if request.keep_probs:
            # A step writes gamma + 1 distributions from the next token on.
            self.probs = zeros(steps + gamma + 1, vocabulary(request.target), dtype=request.probs_dtype)

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
        self.status[:, 0] = self.remaining.masked_fill(self.improper, IMPROPER).masked_fill(self.has_nan, NAN)

    def append(self, proposal: Proposal, outcome: Outcome) -> Tensor:
        """Appends the accepted tokens and the final one to each row; returns how many `(rows,)`
        were emitted.

        `proposal.draft_tokens` is a chain, or the accepted path of a tree. Tokens after an
        end-of-text token, or beyond `remaining`, are not emitted. Cutting them leaves the
        distribution of the tokens before them as it is.
        """
        last = outcome.token[:, None]
        block = torch.cat([proposal.draft_tokens, last], dim=1).scatter_(1, outcome.accepted[:, None], last)
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

    def keep_probs(self, p: Tensor) -> None:
        """Keeps `p` `(rows, n, vocab)` of the next n tokens, if asked for; to be called before they
        are appended."""
        if self.probs is not None:
            places = (self.lengths - self.starts)[:, None] + self.offsets[: p.shape[1]]
            self.probs[self.rows[:, None], places] = p

    def keep_path(self, path: Tensor) -> None:
        """Keeps the nodes `(rows, depth)` that this step accepts; to be called before `remember`
        counts the step."""
        assert self.path is not None
        self.path[self.rows, self.steps] = path

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
        index = torch.tensor(rows, device=self.tokens.device)
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
            )
            for row, (tokens, start, end, steps, record, path) in zip(rows, columns, strict=True)
        ]


class Batch:
    """Rows that are generated together: their state, their caches, and the parts of a step.

    Draft tokens form a chain, or the static tree `drafter.parents`. A subclass may be made of other
    parts; `generate(hooks=Hooks(batch_class=...))` makes its steps:

    request_class  reads the arguments of `generate`
    state_class    makes the state
    runner_class   makes the target with its cache
    """

    request_class: ClassVar[type[Request]] = Request
    state_class: ClassVar[type[State]] = State
    runner_class: type[CachedModel] = CachedModel

    def __init__(self, request: Request) -> None:
        self.drafter: Drafter | None = request.drafter
        self.sampling = request.sampling
        self.rule: Rule = request.rule
        self.vocab = vocabulary(request.target)
        self.state = self.state_class(request)
        parents = None if self.drafter is None else self.drafter.parents
        self.tree = None if parents is None else TokenTree(parents, request.target.device)
        if self.tree is not None:
            self.state.record_path(self.tree.depth)
        self.runner = self.runner_class(request.target, request.slots)
        if self.drafter is not None and self.drafter.hidden_layers:
            self.runner.record_hidden_states(self.drafter.hidden_layers, request.rows)
        self.target_pass: Callable[..., Tensor] = partial(target_pass, self.runner, self.tree)
        # How many draft tokens the next step asks for, and how many its forward pass verifies.
        self.draft_width = self.pass_width = request.gamma
        # A compiled step has gamma draft tokens, or the fewest that its drafter proposes.
        self.compiled = bool(request.compile)
        fewest = request.gamma if self.drafter is None else self.drafter.fewest(request.gamma)
        fixed = self.compiled and fewest == request.gamma
        self.narrows = self.tree is None and request.target.device.type == "cpu" and not fixed
        # Chooses how many tokens each row drafts in the next step.
        self.auto: AutoGamma | None = None
        # How many draft tokens a step can ask for.
        self.widths: tuple[int, ...] = (fewest, request.gamma) if self.narrows else (request.gamma,)
        if request.auto is not None and self.drafter is not None:
            self.widths = widths(request.gamma, request.target, self.drafter, request.compile)
            costs = request.auto.costs_of(self.widths, request.target, self.drafter)
            self.auto = AutoGamma(request.rows, costs, request.auto)
            self.chosen = torch.zeros_like(self.state.lengths)  # how many of these each row keeps
            self.limits = True  # whether some row may keep fewer
            # Which rows had not ended when the host last knew.
            self.going = np.ones(request.rows, dtype=bool)
        self.wrappers: dict[str, list[Callable[..., Any]]] = {}  # of parts of the step, see `wrap`
        # What stands for a part of each width.
        self.parts: dict[tuple[str, int], Callable[..., Any]] = {}

    def clear(self, eos: Sequence[int]) -> None:
        """Forgets earlier sequences; new ones end with `eos`. To be called before rows enter."""
        self.runner.clear()
        self.state.eos.copy_(torch.tensor(eos, dtype=torch.int64))

    def enter(self, rows: list[int], prompts: Sequence[Sequence[int]], uniforms: Uniforms, max_new_tokens: int) -> None:
        """Starts `prompts` in `rows`: fills the target's cache, then calls `Drafter.start`."""
        state = self.state
        index = torch.tensor(rows, device=state.tokens.device)
        state.enter(index, prompts, uniforms, max_new_tokens)
        some = None if len(rows) == len(state.rows) else index
        prefill(self.runner, state.tokens, state.lengths, some)
        if self.drafter is not None:
            self.drafter.start(self.context, some)
        if self.auto is not None:
            self.auto.forget(rows)
            self.going[rows] = True

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

    def choose(self) -> None:
        """Chooses how many tokens each row drafts in the next step. To be called before it."""
        if self.auto is None or self.drafter is None:
            return
        chosen = self.auto.choose(self.drafter.matched(self.context)) * self.going
        self.draft_width = self.pass_width = max(int(chosen.max()), min(self.widths))
        on_device = self.chosen.is_cuda  # where a captured step must do the same each time
        self.limits = on_device or bool((chosen < self.draft_width).any())
        if self.limits:
            counts = torch.empty(len(chosen), dtype=torch.int64, pin_memory=on_device)
            self.chosen.copy_(counts.copy_(torch.from_numpy(chosen)), non_blocking=True)

    def learn(self, status: NDArray[np.int64]) -> None:
        """Learns from a step, whose `State.status` this is. On a device the host knows it one step
        late."""
        if self.auto is not None:
            self.going = status[:, 0] > IDLE
            self.auto.learn(status[:, 1], status[:, 2])

    def step(self) -> None:
        """Draft, verify, emit: one round for every row."""
        self.part("step")()

    def step_in_parts(self, mark: Callable[[str], None] = lambda part: None) -> tuple[Tensor, Outcome]:
        """The same, calling `mark` with the name of each part as it ends; returns draft tokens and
        outcome."""
        draft_tokens, q = self.part("draft")(self.state.step_uniforms[:, : self.draft_width])
        mark("draft")
        logits = self.part("target")(draft_tokens)
        mark("target")
        outcome = self.part("rest")(logits, draft_tokens, q)
        if self.drafter is not None:
            self.drafter.update(self.context, outcome)
        return draft_tokens, outcome

    def wrap(self, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], *parts: str) -> None:
        """From now on runs `parts` through `wrapper`, such as `Compiled` or `Captured`; one for
        each number of draft tokens that a step asks for.

        A part is "draft", "target", "rest" or the whole "step".
        """
        for part in parts:
            self.wrappers.setdefault(part, []).append(wrapper)
        self.parts.clear()

    def part(self, name: str) -> Callable[..., Any]:
        """What runs this part of a step that asks for `draft_width` draft tokens."""
        key = name, self.draft_width
        if key not in self.parts:
            plain: dict[str, Callable[..., Any]] = {
                "step": self.step_in_parts, "draft": self.propose, "target": self.run_target,
                "rest": self.verify_and_emit,
            }  # fmt: skip
            self.parts[key] = reduce(lambda function, wrap: wrap(function), self.wrappers.get(name, []), plain[name])
        return self.parts[key]

    def propose(self, uniforms: Tensor) -> Proposal:
        """The draft tokens of a step, from its uniforms `(rows, draft_width)`; on a CPU the pass is
        no wider than they are."""
        if self.drafter is None or uniforms.shape[1] == 0:
            return nothing(self.state.lengths, self.vocab)
        proposal = self.drafter.propose(self.context, uniforms)
        require_shapes(proposal, len(uniforms), uniforms.shape[1], self.vocab, self.tree is None)
        if self.auto is not None and self.limits:  # a row keeps as many as it would have alone
            kept = (self.state.offsets[: proposal.q.shape[1]] < self.chosen[:, None])[..., None]
            proposal = Proposal(proposal.draft_tokens.where(kept[..., 0], -1), proposal.q.where(kept, 0.0))
        if self.narrows:
            return self.narrowed(proposal)
        draft_tokens, q = proposal
        return padded(draft_tokens[:, : self.pass_width], q[:, : self.pass_width], self.pass_width)

    def narrowed(self, proposal: Proposal) -> Proposal:
        """`proposal` up to the last position at which some row proposes something; compiled, to one
        of two widths."""
        draft_tokens, q = proposal
        used = (draft_tokens != -1) | (q.sum(dim=-1) != 0)
        last = used.any(dim=0) * self.state.offsets[1 : used.shape[1] + 1]
        width = int(last.amax()) if len(last) else 0
        self.pass_width = min(n for n in self.widths if n >= width) if self.compiled else width
        if self.pass_width == 0:
            return nothing(self.state.lengths, self.vocab)
        return padded(draft_tokens[:, :width], q[:, :width], self.pass_width)

    def run_target(self, draft_tokens: Tensor) -> Tensor:
        """The target's logits `(rows, width + 1, vocab)` at the newest token and at each draft
        token."""
        tokens, lengths = self.state.tokens, self.state.lengths
        used = self.runner.in_use(tokens, lengths + draft_tokens.shape[1] - 1)
        return self.target_pass(used, lengths, draft_tokens)

    def verify_and_emit(self, logits: Tensor, draft_tokens: Tensor, q: Tensor) -> Outcome:
        """Applies the rule, appends what it accepts, and records the step."""
        if q.shape[1]:
            draft_tokens = self.checked(draft_tokens, q)
        p = standardise(logits, self.sampling, check=False)
        shape = () if self.tree is None else (self.tree,)
        outcome = self.rule(p, q, draft_tokens, *self.verification_uniforms(), *shape)
        require_outcome(outcome, len(p), with_path=self.tree is not None)
        beta = overlap(p[:, :-1] if self.tree is None else p[:, self.tree.parent_entries], q)
        # A distribution with a NaN is NaN throughout, and so is its overlap with any other.
        last = p[:, -1, 0] if self.tree is None else p[..., 0].sum(dim=1)
        self.state.has_nan |= (last + beta.sum(dim=1)).isnan()
        accepted_chain = Proposal(draft_tokens, q)
        if outcome.path is not None:
            p, accepted_chain = self.made_a_chain(outcome.path, p, accepted_chain)
        self.state.keep_probs(p)
        emitted = self.state.append(accepted_chain, outcome)
        self.state.remember(Proposal(draft_tokens, q), outcome, emitted, beta)
        if self.auto is not None:
            self.state.status[:, 1], self.state.status[:, 2] = (draft_tokens >= 0).sum(dim=1), outcome.accepted
        self.state.prepare_next_step()
        return outcome

    def made_a_chain(self, path: Tensor, p: Tensor, proposal: Proposal) -> tuple[Tensor, Proposal]:
        """Copies the accepted path of a tree to where a chain lies: in the cache, in p and in the
        draft tokens."""
        self.state.keep_path(path)
        # Entries after the last accepted node are -1. What they select lies behind the row's new
        # length.
        root, nodes = torch.zeros_like(path[:, :1]), path.clamp_min(0)
        first = self.state.lengths[:, None]
        self.runner.move(first + nodes, first + self.state.offsets[: path.shape[1]])
        along = p.take_along_dim(torch.cat([root, path + 1], dim=1)[..., None], dim=1)
        return along, Proposal(proposal.draft_tokens.gather(1, nodes), proposal.q)

    def verification_uniforms(self) -> tuple[Tensor, Tensor]:
        """The uniforms of this step's rule: `(rows, pass_width)` for acceptance, `(rows,)` for the
        final sample."""
        _, accept, final = self.state.step_uniforms.split([self.state.gamma, self.state.gamma, 1], dim=1)
        return accept[:, : self.pass_width], final[:, 0]

    def checked(self, draft_tokens: Tensor, q: Tensor) -> Tensor:
        """Marks the rows with an improper proposal; returns the draft tokens, clamped so that a
        rule can index by them.

        Rows that have ended are not checked. NaN is not marked here: it is found in the overlap.
        """
        known = draft_tokens.clamp(-1, self.vocab - 1)
        wrong = no_distribution(Proposal(draft_tokens, q)) | (known != draft_tokens)
        # A token whose q is 0 was not sampled from q, and a rule would accept it with certainty.
        wrong |= (known >= 0) & (q.gather(-1, known.clamp_min(0)[..., None])[..., 0] == 0)
        self.state.improper |= wrong.any(dim=1) & (self.state.remaining > IDLE)
        return known

    def warm_up(self, progress: bool) -> None:
        """Makes steps on a meaningless sequence: they compile each part for each width, or capture
        the step."""
        rows, state = len(self.state.rows), self.state
        self.clear([0] * len(state.eos))
        zeros = torch.zeros(rows, 1, state.gamma, dtype=torch.float64)
        self.enter(list(range(rows)), [[0, 0]] * rows, Uniforms(zeros, zeros, torch.zeros(rows, 1).double()), 1)
        narrows, self.narrows = self.narrows, False
        with tqdm(total=4 * len(self.widths), desc="compiling (once)", leave=False, disable=not progress) as bar:
            for width in reversed(self.widths):
                self.draft_width, self.pass_width = state.gamma if self.auto is None else width, width
                self.step_in_parts(lambda part: bar.update())
                if "step" in self.wrappers:
                    self.step()  # captures it
                bar.update()
        self.draft_width, self.pass_width, self.narrows = state.gamma, state.gamma, narrows


def target_pass(
    runner: CachedModel, tree: TokenTree | None, tokens: Tensor, lengths: Tensor, draft_tokens: Tensor
) -> Tensor:
    """See `Batch.run_target`. It reads nothing but its arguments, so several batches can share it
    compiled.

    The slots of `tokens` are those that the pass reads.
    """
    first, width = lengths - 1, draft_tokens.shape[1] + 1
    slots = first[:, None] + torch.arange(width, device=first.device)
    newest = tokens.gather(1, slots[:, :1])
    entries = torch.cat([newest, draft_tokens.clamp(0, runner.vocab - 1)], dim=1)
    seen = tokens.shape[1]
    if tree is None:
        return runner.run(entries, slots, keep=width, seen=seen)
    positions, visible = tree.positions(first), tree.visible(first, seen)
    return runner.run(entries, slots, keep=width, positions=positions, visible=visible, seen=seen)


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
