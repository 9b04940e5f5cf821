"""Other heads than `specnb.heads` has, which read the target's states and whose states the target's
output head reads.

    AttentionHead                        attends to the tokens so far, in a format of its own
    RecurrentHead, FeatureDrafter        continues the last hidden state token by token: each
                                         depends on those before it
    ParallelHeads, ParallelHeadsDrafter  one network for each position: all draft tokens come from
                                         one call

The state of the last two begins at the token before the newest one: the newest was sampled from it.

>>> from specnb import generate, load_pair
>>> target = load_pair().target
>>> drafter = FeatureDrafter(target, RecurrentHead(target.config.hidden_size, hidden=16))  # not trained
>>> len(generate(target, [[0, 5]], drafter, gamma=2, max_new_tokens=4).tokens[0])
4
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
from specnb.distributions import Sampling, sample
from specnb.drafters import Context, Proposal, padded
from specnb.formats import CONFIG
from specnb.heads import WEIGHTS, AttentionDrafter, HeadDrafter

EPSILON = 1e-6
KNOWN = 8  # output rows of the target by which a head that proposes some tokens recognises it


def normalised(values: Tensor) -> Tensor:
    return rms_norm(values, values.shape[-1:], eps=EPSILON)


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
    cached = chained = 1

    def __init__(self, width: int, hidden: int, heads: int, layers: Sequence[int], proposed: int = 0) -> None:
        super().__init__()
        self.settings = {"width": width, "hidden": hidden, "heads": heads, "layers": list(layers)}
        if proposed:
            self.settings["proposed"] = proposed
            self.register_buffer("proposed", torch.zeros(proposed, dtype=torch.int64))
            self.register_buffer("known", torch.zeros(min(KNOWN, proposed), width))
        self.heads, self.hidden_layers = heads, tuple(layers)
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
        each = states.unflatten(-1, (len(self.hidden_layers), -1))
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

    def after(self, state: Tensor, embedded: Tensor, slots: Tensor, cache: RaggedCache, layer: int) -> Tensor:
        bias = self.bias(slots[..., None] - torch.arange(cache.seen, device=slots.device))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            return scaled_dot_product_attention(query, keys, values, attn_mask=bias)

        return self(state, embedded, attend)  # type: ignore[no-any-return]

    def bias(self, distance: Tensor) -> Tensor:
        """The bias of attention scores at `distance` `(batch, n, slots)`; it hides later tokens."""
        dtype = self.scale.dtype
        near = -self.slopes[:, None, None] * distance[:, None]
        return near.to(dtype).masked_fill_(distance[:, None] < 0, torch.finfo(dtype).min)


class RecurrentHead(SequentialHead):
    """state' = state + f(state, embedding of the newest token), in `layers` gated layers of
    `hidden` units.

    The recurrent draft of ReDrafter (arXiv:2403.09919) and, with other layers, of Hydra
    (arXiv:2402.05109).

    >>> head = RecurrentHead(width=8, hidden=16)
    >>> head(torch.ones(3, 8), torch.ones(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, width: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.settings = {"width": width, "hidden": hidden, "layers": layers}
        self.gates = nn.ModuleList([nn.Linear(2 * width, hidden, bias=False) for _ in range(layers)])
        self.ups = nn.ModuleList([nn.Linear(2 * width, hidden, bias=False) for _ in range(layers)])
        self.downs = nn.ModuleList([nn.Linear(hidden, width, bias=False) for _ in range(layers)])
        self.scale = nn.Parameter(torch.ones(width))
        for down in self.downs:
            nn.init.zeros_(down.weight)  # type: ignore[arg-type]  # of a module list; the stub does not say which

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The state `(..., width)` after one more token, whose embedding is `embedded`
        `(..., width)`."""
        embedded = normalised(embedded)
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            both = torch.cat([normalised(state), embedded], dim=-1)
            state = state + down(silu(gate(both)) * up(both))
        return state


class ParallelHeads(nn.Module):
    """`count` heads, one for each draft token: all of them read the same state, as in Medusa
    (arXiv:2401.10774).

    >>> ParallelHeads(width=8, hidden=16, count=3)(torch.ones(2, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.settings = {"width": width, "hidden": hidden, "count": count}
        self.ups = nn.ModuleList([nn.Linear(width, hidden, bias=False) for _ in range(count)])
        self.downs = nn.ModuleList([nn.Linear(hidden, width, bias=False) for _ in range(count)])
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, state: Tensor) -> Tensor:
        """The inputs `(..., count, width)` of the target's output head, one for each token after
        the newest."""
        read = normalised(state)
        each = [down(silu(up(read))) for up, down in zip(self.ups, self.downs, strict=True)]
        return normalised(state[..., None, :] + torch.stack(each, dim=-2)) * self.scale


KINDS: dict[str, type[nn.Module]] = {  # by the name saved with them
    "attention": AttentionHead, "recurrent": RecurrentHead, "parallel": ParallelHeads,
}  # fmt: skip


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


def attention_drafter(
    target: PreTrainedModel, head: AttentionHead, sampling: Sampling = Sampling(), **settings: Any
) -> AttentionDrafter:
    """The drafter with `head`, whose output rows are those of the target for what it proposes."""
    drafter = AttentionDrafter(target, head, sampling, **settings)
    if hasattr(head, "known"):
        drafter.output = output_rows(target, head)
    return drafter


class FeatureDrafter(HeadDrafter):
    """Draft tokens sampled one after the other from a `RecurrentHead`, which continues the last
    hidden state.

    There is no cache.
    """

    def first_state(self, context: Context, drafted: int) -> Tensor:
        state = context.last_hidden_state.to(self.head.scale.dtype)
        return self.next_state(state, context.newest, context.lengths - 1)

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return self.head(state, self.embedding(token))  # type: ignore[no-any-return]


class ParallelHeadsDrafter(HeadDrafter):
    """Draft tokens sampled independently of each other, each from its own one of `ParallelHeads` on
    one state.

    Proposes as many tokens as there are heads, and none after them. The newest token is not read,
    so the first head predicts the token after it from the state that the newest was sampled from.
    """

    @torch.no_grad()
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        q = self.first_state(context, 0)[:, : uniforms.shape[1]]
        return Proposal(sample(q, uniforms[:, : q.shape[1]]), q)

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        return padded(*self.propose(context, tokens.double()), tokens.shape[1]).q  # whatever is sampled

    def first_state(self, context: Context, drafted: int) -> Tensor:
        """The distributions of all heads, `(rows, count, vocab)`."""
        return self.q(self.head(context.last_hidden_state.to(self.head.scale.dtype)))
