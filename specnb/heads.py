"""Drafters that read the target's hidden states: no draft model, and no forward pass of one over
the prompt.

The target's forward pass has already computed what the sequence says about the next token. A small
network, the head, turns its hidden states and the newest token into the next distributions, with
the target's own embeddings and output head.

    AttentionHead, AttentionDrafter  a transformer layer that also sees the states and tokens before
    HeadDrafter                      what drafters with other heads inherit from
    FallbackDrafter                  copies of the text so far, and a head's tokens where there are none

The head reads the states of several layers at the token before the newest one: the newest was
sampled from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from specnb.cache import RaggedCache, decoder_config
from specnb.distributions import Sampling, require_sampling, sample, standardise
from specnb.drafters import ChainDrafter, Context, Drafter, Proposal, padded, require_own_batch
from specnb.fast import Compile, pack, shared_copy
from specnb.number_checks import shown
from specnb.rules import Outcome
from specnb.support import require_supported, vocabulary

EPSILON = 1e-6
# Rows of the target's output head by which a head that proposes some tokens only knows it again.
KNOWN = 8
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class SequentialHead(nn.Module):
    """A head with one state for each draft token."""

    scale: nn.Parameter

    def features(self, state: Tensor) -> Tensor:
        """The input `(..., width)` of the target's output head, for the distribution of the next
        token."""
        return normalised(state) * self.scale


class AttentionHead(SequentialHead):
    """One transformer layer over pairs of a token's embedding and the target's states at the token
    before it.

    The draft of EAGLE (arXiv:2401.15077), with states of several layers as in EAGLE-3
    (arXiv:2503.01840): `layers` of the target, numbered as in `output_hidden_states` of
    transformers. For a token that the target has not computed yet, the head's own state is used. In
    place of positions, the distance to a token times a slope is subtracted from its attention
    score, with a slope for each of the `heads` (Press et al., arXiv:2108.12409); here `heads // 2`
    are 0.

    With `proposed`, so many of the target's tokens can be drafted, those that `choose` was told;
    all others have q = 0.

    >>> head = AttentionHead(width=8, hidden=16, heads=2, layers=(1, -1))
    >>> states = head.combined(torch.ones(3, 5, 16))
    >>> head(states, torch.ones(3, 5, 8), lambda query, key, value: value).shape
    torch.Size([3, 5, 8])
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
        """The tokens that can be drafted, and by what `target` is known again: its output rows of
        the first of them."""
        self.proposed.copy_(tokens)
        self.known.copy_(target.get_output_embeddings().weight[tokens[:KNOWN]])

    def combined(self, states: Tensor) -> Tensor:
        """One state `(..., width)` of the target's states `(..., layers * width)`."""
        each = states.unflatten(-1, (len(self.layers), -1))
        return self.states_projection(normalised(each).flatten(-2))  # type: ignore[no-any-return]

    def forward(self, state: Tensor, embedded: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The states `(batch, n, width)` of n tokens with the embeddings `embedded`, given those
        before them, `state`.

        `attend` gets query, key and value of these tokens, all `(batch, heads, n, width / heads)`,
        and returns what the queries read, of the same shape.
        """
        entered = self.input_projection(torch.cat([normalised(state), normalised(embedded)], dim=-1))
        each = self.attention(normalised(entered)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in each.unbind(dim=2))
        seen = entered + self.output_projection(attend(query, key, value).transpose(1, 2).flatten(2))
        read = normalised(seen)
        return seen + self.down(silu(self.gate(read)) * self.up(read))  # type: ignore[no-any-return]

    def bias(self, distance: Tensor) -> Tensor:
        """What is added to the scores `(batch, heads, n, slots)` of tokens at `distance`
        `(batch, n, slots)`.

        For a negative distance, so for a later token, it is the most negative number of the dtype.

        >>> AttentionHead(width=8, hidden=16, heads=2, layers=(-1,)).bias(torch.tensor([[[2, 0]]]))[:, :, 0].tolist()
        [[[-0.0, -0.0], [-2.0, -0.0]]]
        """
        dtype = self.scale.dtype
        near = -self.slopes[:, None, None] * distance[:, None]
        return near.to(dtype).masked_fill_(distance[:, None] < 0, torch.finfo(dtype).min)


KINDS: dict[str, type[nn.Module]] = {"attention": AttentionHead}
"""Kinds of heads by the name that is saved with them; others are added where they are defined."""


def save_head(head: Any, folder: Path) -> None:
    """Writes the weights in bfloat16, and the settings."""
    folder.mkdir(parents=True, exist_ok=True)
    (kind,) = (name for name, made in KINDS.items() if isinstance(head, made))
    weights = {name: weight if name == "proposed" else weight.bfloat16() for name, weight in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"kind": kind} | head.settings, indent=1) + "\n", encoding="utf-8")


def load_head(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The head that `save_head` wrote to `folder`.

    Raises `ValueError` for another kind of head, `OSError` for a file that is not there, and what
    torch raises for weights that do not fit.

    >>> import tempfile
    >>> save_head(AttentionHead(8, 16, 2, layers=(-1,)), folder := Path(tempfile.mkdtemp()))
    >>> load_head(folder).settings
    {'width': 8, 'hidden': 16, 'heads': 2, 'layers': [-1]}
    """
    folder = Path(folder)
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    kind = settings.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"{folder} holds a head of kind {kind!r}; it must be one of {', '.join(KINDS)}")
    head = KINDS[kind](**settings)
    head.load_state_dict(load_file(folder / WEIGHTS))
    return head.to(dtype).eval()


def normalised(values: Tensor) -> Tensor:
    """`values` over their root mean square.

    >>> normalised(torch.tensor([3.0, 4.0])).square().mean().round(decimals=3)
    tensor(1.)
    """
    return rms_norm(values, values.shape[-1:], eps=EPSILON)


def require_head(target: PreTrainedModel, head: object, kind: type) -> None:
    """Raises `TypeError` or `ValueError` unless `head` is one of `kind` that fits `target`."""
    if not isinstance(head, kind):
        raise TypeError(f"head is {shown(head)}; give one of the class {kind.__name__}")
    width = head.settings["width"]  # type: ignore[attr-defined]  # every head has it
    wanted = decoder_config(target).hidden_size
    if width != wanted:
        raise ValueError(
            f"the head reads states of width {width}, and {type(target).__name__} has {wanted}; "
            "give the head that was trained for this target"
        )
    own, its = next(head.parameters()), target.dtype  # type: ignore[attr-defined]  # every head is a module
    if own.dtype != its or own.device != target.device:
        raise ValueError(
            f"the head is {own.dtype} on {own.device}, and the target {its} on {target.device}; "
            "give head.to(target.device, target.dtype)"
        )


def output_rows(target: PreTrainedModel, head: Any) -> nn.Linear:
    """The output head of `target` for the tokens that `head` can propose: a copy.

    Raises `ValueError` for a head that was trained for another target.
    """
    weight, proposed = target.get_output_embeddings().weight, head.proposed
    few = int(proposed.max()) >= len(weight)
    if few or not torch.allclose(weight[proposed[:KNOWN]].float(), head.known.float(), rtol=0.02):
        raise ValueError(
            f"the head was trained for another target than this {type(target).__name__}, whose output head differs; "
            "give the head that was trained for it"
        )
    rows = nn.Linear(weight.shape[1], len(proposed), bias=False, device="meta")
    rows.weight = nn.Parameter(weight[proposed], requires_grad=False)
    return rows


class HeadDrafter(ChainDrafter):
    """Drafts with `head`, which was trained on the hidden states of `target`, as `sampling` says.

    From one `start` to the next either `propose` is called, always with the same gamma, or
    `distribution`, by a mixture or a stopping rule. It drafts `most` tokens at most, where more are
    asked for; None for no such limit. With `compile="auto"` its linear layers use the products that
    are fastest on this CPU, in a copy of the head. Raises `TypeError` for a head of another kind
    than the drafter's, a target that the loop cannot run and a `sampling` that is no `Sampling`,
    and `ValueError` for a head of another width, dtype or device.
    """

    kind: ClassVar[type]
    hidden_layers = (-1,)
    capturable = True

    def __init__(
        self, target: PreTrainedModel, head: nn.Module, sampling: Sampling = Sampling(), *, compile: Compile = False,
        most: int | None = None,
    ) -> None:  # fmt: skip
        require_supported(target)
        require_head(target, head, self.kind)
        require_sampling(sampling)
        self.head: Any = shared_copy(head)
        self.sampling, self.most = sampling, most
        self.vocab = vocabulary(target)
        self.embedding, self.output = target.get_input_embeddings(), target.get_output_embeddings()
        self.proposed: Tensor | None = getattr(head, "proposed", None)
        if self.proposed is not None:
            self.output = output_rows(target, head)
        if compile == "auto":
            pack(nn.ModuleList([self.head, self.output] if self.proposed is not None else [self.head]))
        self.state: Any = None
        self.evaluated = 0  # draft tokens whose distribution was computed in the last step

    @torch.no_grad()
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return Proposal(*self.drafted(context.tokens, context.lengths, self.recorded(context), uniforms))

    def fewest(self, gamma: int) -> int:
        return gamma if self.most is None else min(self.most, gamma)

    def recorded(self, context: Context) -> Tensor:
        """The target's hidden states, in the head's dtype. Raises `ValueError` where there are
        none."""
        if context.hidden_states is None:
            raise ValueError("there are no hidden states; give this drafter to generate, which records them for it")
        return context.hidden_states.to(self.head.scale.dtype)

    def drafted(self, tokens: Tensor, lengths: Tensor, states: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draft tokens and q, of the parts of a `Context` and `uniforms` `(rows, gamma)`."""
        # Another drafter's tokens may have been accepted, as many as were asked for.
        state = self.first_state(Context(tokens, lengths, states), uniforms.shape[1])
        draft_tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for position, uniform in enumerate(uniforms[:, : self.most].unbind(dim=1)):
            if position:
                state = self.next_state(state, draft_tokens[-1], lengths + position - 1)
            distributions.append(self.after(state, position))
            draft_tokens.append(sample(distributions[-1], uniform))
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)

    @torch.no_grad()
    def distribution(self, context: Context, position: int) -> Tensor:
        """For mixtures and stopping rules, which sample from it themselves."""
        if position:
            self.state = self.next_state(self.state, context.newest, context.lengths - 1)
        else:
            self.state = self.first_state(context._replace(hidden_states=self.recorded(context)), self.evaluated)
        self.evaluated = position + 1
        return self.after(self.state, position)

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """What the first draft token depends on. The last step computed at most `drafted` draft
        tokens."""
        raise NotImplementedError

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """What the next draft token depends on, after the draft tokens `token` `(rows,)` in the
        slots `slot`."""
        raise NotImplementedError

    def after(self, state: Tensor, position: int) -> Tensor:
        """q `(rows, vocab)` of the draft token at `position` of a step."""
        return self.q(self.head.features(state))

    def q(self, features: Tensor) -> Tensor:
        """q of the input `features` `(..., width)` of the output head."""
        q = standardise(self.output(features), self.sampling, check=False)
        if self.proposed is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.vocab).index_copy_(-1, self.proposed, q)


class AttentionDrafter(HeadDrafter):
    """Draft tokens sampled one after the other from an `AttentionHead`, with the keys and values of
    the tokens before.

    A step first computes the keys and values of the tokens since the last step with the target's
    states, because those of draft tokens were computed with the head's own. `capturable` says that
    the drafter serves one batch only, so that a CUDA graph may hold its operations. Raises what
    `HeadDrafter` does.
    """

    kind = AttentionHead
    cache: RaggedCache

    def __init__(
        self, target: PreTrainedModel, head: nn.Module, sampling: Sampling = Sampling(), *, compile: Compile = False,
        capturable: bool = False, most: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, head, sampling, compile=compile, most=most)
        self.hidden_layers, self.capturable = self.head.layers, capturable
        self.allocated: tuple[Any, ...] = ()

    @torch.no_grad()
    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Computes the keys and values of the prompts."""
        tokens, lengths, states = context.tokens, context.lengths, self.recorded(context)
        if rows is None:
            self.evaluated = 0
            sizes = (*tokens.shape, self.head.scale.dtype, self.head.scale.device)
            # Kept for later batches: a graph may hold its tensors.
            if self.allocated != sizes:
                require_own_batch(self, sizes)
                self.allocated, self.cache = sizes, RaggedCache(1, tokens.shape[1])
            self.cache.clear()
        else:
            tokens, lengths, states = tokens[rows], lengths[rows], states[rows]
        slots = torch.arange(int(lengths.max()), device=tokens.device).expand(len(tokens), -1)
        self._enter(tokens, states, slots, rows)

    def first_state(self, context: Context, drafted: int) -> Tensor:
        # After full acceptance the newest `drafted` + 1 tokens have states that the cache was not
        # computed with. In a row of fewer tokens the first is computed several times.
        tokens, lengths, states = context.tokens, context.lengths, context.hidden_states
        back = torch.arange(-1 - drafted, 0, device=lengths.device)
        return self._enter(tokens, states, (lengths[:, None] + back).clamp_min(0))[:, -1]  # type: ignore[arg-type]

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return self._read(state[:, None], token[:, None], slot[:, None])[:, 0]

    def _enter(self, tokens: Tensor, states: Tensor, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states `(rows, n, width)` of the tokens in `slots` `(rows, n)`, with the
        target's states."""
        before = states.take_along_dim((slots - 1).clamp_min(0)[..., None], dim=1)
        state = self.head.combined(before).where(slots[..., None] > 0, 0.0)
        return self._read(state, tokens.gather(1, slots), slots, rows)

    def _read(self, state: Tensor, tokens: Tensor, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's states `(rows, n, width)` of `tokens` `(rows, n)` in `slots`, which are in the
        cache from now."""
        self.cache.write_at(slots, rows, self.cache.least(slots))
        bias = self.head.bias(slots[..., None] - torch.arange(self.cache.seen, device=slots.device))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.update(key, value, 0)
            return scaled_dot_product_attention(query, keys, values, attn_mask=bias)

        return self.head(state, self.embedding(tokens), attend)  # type: ignore[no-any-return]


class FallbackDrafter(Drafter):
    """A row whose sequence has a match copies for the whole step; the other rows draft with a head.

    Which of both is decided before anything is sampled, by the sequence alone, so the q of the one
    that is used is exact. The head, which reads the target's hidden states, is run in every step.

    Parameters
    ----------
    copy
        A drafter without a model, such as a `PromptLookupDrafter`.
    head
        What drafts where nothing is copied.
    gamma
        What `gamma="auto"` stands for: the most tokens that are copied.
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
        copied = self.copy.propose(context, uniforms)
        copies = padded(*copied, uniforms.shape[1]).draft_tokens[:, 0] >= 0
        sampled = self.head.propose(context, uniforms)
        width = max(copied.draft_tokens.shape[1], sampled.draft_tokens.shape[1])
        copied, sampled = padded(*copied, width), padded(*sampled, width)
        return Proposal(
            copied.draft_tokens.where(copies[:, None], sampled.draft_tokens),
            copied.q.to(sampled.q.dtype).where(copies[:, None, None], sampled.q),
        )

    def update(self, context: Context, outcome: Outcome) -> None:
        self.copy.update(context, outcome)
        self.head.update(context, outcome)
