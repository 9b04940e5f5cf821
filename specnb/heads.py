"""Drafters with a head, a small network that turns the target's hidden states and the newest token
into the next distributions.

Embeddings and output head are the target's own, and no draft model passes over the prompt.
`AttentionDrafter` drafts with an `AttentionHead`; `FallbackDrafter` copies if it can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from specnb.cache import RaggedCache
from specnb.distributions import Sampling, sample, standardise
from specnb.drafters import Context, Drafter, Proposal, padded, require_own_batch
from specnb.fast import Compile, pack, shared_copy
from specnb.rules import Outcome
from specnb.support import require_supported, vocabulary

EPSILON = 1e-6
KNOWN = 8  # output rows of the target by which a head that proposes some tokens recognises it
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class SequentialHead(nn.Module):
    scale: nn.Parameter

    def features(self, state: Tensor) -> Tensor:
        return normalised(state) * self.scale


class AttentionHead(SequentialHead):
    """One transformer layer over pairs of a token's embedding and the target's states at the token before it.

    Parameters
    ----------
    width, hidden, heads
        Width of the target's states, of the feed-forward part, and number of attention heads.
    layers
        The target's hidden states to read, numbered as `output_hidden_states` of transformers.
    proposed
        Number of tokens that can be drafted, set by `choose`; 0 for all.

    Notes
    -----
    The draft of EAGLE (arXiv:2401.15077) with states of several layers as in EAGLE-3
    (arXiv:2503.01840). In place of positions, half of the heads subtract a multiple of the distance
    from attention scores (arXiv:2108.12409).
    """

    slopes: Tensor
    proposed: Tensor
    known: Tensor

    def __init__(self, width: int, hidden: int, heads: int, layers: Sequence[int], proposed: int = 0) -> None:
        super().__init__()
        self.settings = {"width": width, "hidden": hidden, "heads": heads, "layers": list(layers)}
        if proposed:
            self.settings["proposed"] = proposed
            self.register_buffer("proposed", torch.zeros(proposed, dtype=torch.int64))
            self.register_buffer("known", torch.zeros(min(KNOWN, proposed), width))
        self.heads, self.layers = heads, tuple(layers)
        self.states_projection = nn.Linear(len(layers) * width, width, bias=False)
        self.input_projection = nn.Linear(2 * width, width, bias=False)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.output_projection = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        near = heads - heads // 2
        slopes = [0.0] * (heads // 2) + [4.0 ** (1 - near + head) for head in range(near)]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)
        nn.init.zeros_(self.output_projection.weight)
        nn.init.zeros_(self.down.weight)

    def choose(self, target: PreTrainedModel, tokens: Tensor) -> None:
        self.proposed.copy_(tokens)
        self.known.copy_(target.get_output_embeddings().weight[tokens[:KNOWN]])

    def combined(self, states: Tensor) -> Tensor:
        each = states.unflatten(-1, (len(self.layers), -1))
        return self.states_projection(normalised(each).flatten(-2))  # type: ignore[no-any-return]

    def forward(self, state: Tensor, embedded: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """States `(batch, n, width)` of n tokens, from the states before them and their embeddings.

        `attend` gets query, key and value `(batch, heads, n, width / heads)` and returns what the
        queries read.
        """
        entered = self.input_projection(torch.cat([normalised(state), normalised(embedded)], dim=-1))
        each = self.attention(normalised(entered)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in each.unbind(dim=2))
        seen = entered + self.output_projection(attend(query, key, value).transpose(1, 2).flatten(2))
        read = normalised(seen)
        return seen + self.down(silu(self.gate(read)) * self.up(read))  # type: ignore[no-any-return]

    def bias(self, distance: Tensor) -> Tensor:
        """The bias of attention scores at `distance` `(batch, n, slots)`; it hides later tokens."""
        dtype = self.scale.dtype
        near = -self.slopes[:, None, None] * distance[:, None]
        return near.to(dtype).masked_fill_(distance[:, None] < 0, torch.finfo(dtype).min)


# Heads by the name saved with them; others are added where they are defined
KINDS: dict[str, type[nn.Module]] = {"attention": AttentionHead}


def save_head(head: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (kind,) = (name for name, head_class in KINDS.items() if isinstance(head, head_class))
    weights = {name: weight if name == "proposed" else weight.bfloat16() for name, weight in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"kind": kind} | head.settings, indent=1) + "\n", encoding="utf-8")


def load_head(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The head that `save_head` wrote to `folder`."""
    folder = Path(folder)
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    head = KINDS[settings.pop("kind")](**settings)
    head.load_state_dict(load_file(folder / WEIGHTS))
    return head.to(dtype).eval()


def normalised(values: Tensor) -> Tensor:
    return rms_norm(values, values.shape[-1:], eps=EPSILON)


def output_rows(target: PreTrainedModel, head: Any) -> nn.Linear:
    """The target's output head for the tokens that `head` proposes; `ValueError` for another target's head."""
    weight, proposed = target.get_output_embeddings().weight, head.proposed
    if not torch.allclose(weight[proposed[:KNOWN]].float(), head.known.float(), rtol=0.02):
        raise ValueError(
            f"the head was trained for another target than this {type(target).__name__}, whose output head differs; "
            "give the head that was trained for it"
        )
    rows = nn.Linear(weight.shape[1], len(proposed), bias=False, device="meta")
    rows.weight = nn.Parameter(weight[proposed], requires_grad=False)
    return rows


class HeadDrafter(Drafter):
    """A drafter with a head that was trained on the hidden states of `target`.

    Between two calls of `start` gamma stays the same. `most` limits the draft tokens of a step;
    `compile="auto"` packs weights on a CPU.
    """

    hidden_layers = (-1,)
    capturable = True

    def __init__(
        self, target: PreTrainedModel, head: nn.Module, sampling: Sampling = Sampling(), *, compile: Compile = False,
        most: int | None = None,
    ) -> None:  # fmt: skip
        require_supported(target)
        self.head: Any = shared_copy(head)
        self.sampling, self.most = sampling, most
        self.vocab = vocabulary(target)
        self.embedding, self.output = target.get_input_embeddings(), target.get_output_embeddings()
        self.proposed: Tensor | None = getattr(head, "proposed", None)
        if self.proposed is not None:
            self.output = output_rows(target, head)
        if compile == "auto":
            pack(nn.ModuleList([self.head, self.output] if self.proposed is not None else [self.head]))

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return self.in_turn(context, uniforms.shape[1], lambda position, q: sample(q, uniforms[:, position]))

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        return padded(*self.in_turn(context, width, lambda position, q: tokens[:, position]), width).q

    @torch.no_grad()
    def in_turn(self, context: Context, width: int, choose: Callable[[int, Tensor], Tensor]) -> Proposal:
        # The last step may have accepted tokens of another drafter, as many as were asked for.
        state = self.first_state(context, width)
        draft_tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for position in range(width if self.most is None else min(self.most, width)):
            if position:
                state = self.next_state(state, draft_tokens[-1], context.lengths + position - 1)
            distributions.append(self.q(self.head.features(state)))
            draft_tokens.append(choose(position, distributions[-1]))
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))

    def fewest(self, gamma: int) -> int:
        return gamma if self.most is None else min(self.most, gamma)

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """The state for the first draft token; the last step evaluated at most `drafted` draft tokens."""
        raise NotImplementedError

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        raise NotImplementedError

    def q(self, features: Tensor) -> Tensor:
        q = standardise(self.output(features), self.sampling, check=False)
        if self.proposed is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.vocab).index_copy_(-1, self.proposed, q)


class AttentionDrafter(HeadDrafter):
    """Draft tokens sampled one after the other from an `AttentionHead`.

    A step first computes the tokens since the last step anew, with the target's states; those of
    draft tokens came from the head's own.
    """

    cache: RaggedCache
    known: int | None = None  # slots that the host knows to be enough

    def __init__(
        self, target: PreTrainedModel, head: nn.Module, sampling: Sampling = Sampling(), *, compile: Compile = False,
        capturable: bool = False, most: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, head, sampling, compile=compile, most=most)
        self.hidden_layers, self.capturable = self.head.layers, capturable
        self.allocated: tuple[Any, ...] = ()

    @torch.no_grad()
    def start(self, context: Context, rows: Tensor | None = None) -> None:
        if rows is None:
            sizes = (*context.tokens.shape, self.head.scale.dtype, self.head.scale.device)
            # The cache is kept for later batches, because a graph may hold its tensors.
            if self.allocated != sizes:
                require_own_batch(self, sizes)
                self.allocated, self.cache = sizes, RaggedCache(1, context.tokens.shape[1])
            self.cache.clear()
        else:
            states: Any = context.hidden_states
            context = Context(context.tokens[rows], context.lengths[rows], states[rows])
        slots = torch.arange(int(context.lengths.max()), device=context.lengths.device)
        self.known = None
        self._enter(context, slots.expand(len(context.lengths), -1), rows)

    def first_state(self, context: Context, drafted: int) -> Tensor:
        # After full acceptance the newest `drafted` + 1 tokens are to be computed with the target's states;
        # in a row of fewer tokens the first one is computed several times.
        back = torch.arange(-1 - drafted, 0, device=context.lengths.device)
        self.known = context.seen
        return self._enter(context, (context.lengths[:, None] + back).clamp_min(0))[:, -1]

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return self._read(state[:, None], token[:, None], slot[:, None])[:, 0]

    def _enter(self, context: Context, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states of the tokens in `slots` `(rows, n)`, from the target's states."""
        states: Any = context.hidden_states
        before = states.take_along_dim((slots - 1).clamp_min(0)[..., None], dim=1).to(self.head.scale.dtype)
        state = self.head.combined(before).where(slots[..., None] > 0, 0.0)
        return self._read(state, context.tokens.gather(1, slots), slots, rows)

    def _read(self, state: Tensor, tokens: Tensor, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        self.cache.write_at(slots, rows, self.cache.least(slots, known=self.known))
        bias = self.head.bias(slots[..., None] - torch.arange(self.cache.seen, device=slots.device))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return scaled_dot_product_attention(query, keys, values, attn_mask=bias)

        return self.head(state, self.embedding(tokens), attend)  # type: ignore[no-any-return]


class FallbackDrafter(Drafter):
    """Rows with a match copy for the whole step, as `copy` does; the other rows draft with `head`.

    The sequence alone decides, before anything is sampled, so q is exact. The head runs in every
    step.
    """

    def __init__(self, copy: Drafter, head: HeadDrafter, gamma: int = 10) -> None:
        self.copy, self.head, self.gamma = copy, head, gamma
        self.vocab, self.hidden_layers = head.vocab, head.hidden_layers
        self.can_refill = copy.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.copy.start(context, rows)
        self.head.start(context, rows)

    def fewest(self, gamma: int) -> int:
        return self.head.fewest(gamma)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        copied, sampled = self.copy.propose(context, uniforms), self.head.propose(context, uniforms)
        width = max(copied.draft_tokens.shape[1], sampled.draft_tokens.shape[1])
        copied, sampled = padded(*copied, width), padded(*sampled, width)
        copies = copied.draft_tokens[:, :1] >= 0
        return Proposal(
            copied.draft_tokens.where(copies, sampled.draft_tokens),
            copied.q.to(sampled.q.dtype).where(copies[..., None], sampled.q),
        )

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        copied, sampled = (drafter.along(context, tokens) for drafter in (self.copy, self.head))
        copies = copied[:, :1].sum(dim=-1, keepdim=True) > 0
        return copied.to(sampled.dtype).where(copies, sampled)

    def update(self, context: Context, outcome: Outcome) -> None:
        self.copy.update(context, outcome)
        self.head.update(context, outcome)
