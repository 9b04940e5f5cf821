"""Other heads than `specnb.heads` has, which read the target's states and whose states the target's
output head reads.

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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from specnb.distributions import sample
from specnb.drafters import Context, Proposal, padded
from specnb.formats import CONFIG
from specnb.heads import AttentionDrafter
from studies.files import WEIGHTS

EPSILON = 1e-6


def normalised(values: Tensor) -> Tensor:
    return rms_norm(values, values.shape[-1:], eps=EPSILON)


class RecurrentHead(nn.Module):
    """state' = state + f(state, embedding of the newest token), in `layers` gated layers of
    `hidden` units.

    The recurrent draft of ReDrafter (arXiv:2403.09919) and, with other layers, of Hydra
    (arXiv:2402.05109).

    >>> head = RecurrentHead(width=8, hidden=16)
    >>> head(torch.ones(3, 8), torch.ones(3, 8)).shape
    torch.Size([3, 8])
    """

    hidden_layers = (-1,)

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

    def features(self, state: Tensor) -> Tensor:
        return normalised(state) * self.scale


class ParallelHeads(nn.Module):
    """`count` heads, one for each draft token: all of them read the same state, as in Medusa
    (arXiv:2401.10774).

    >>> ParallelHeads(width=8, hidden=16, count=3)(torch.ones(2, 8)).shape
    torch.Size([2, 3, 8])
    """

    hidden_layers = (-1,)

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


KINDS: dict[str, type[nn.Module]] = {"recurrent": RecurrentHead, "parallel": ParallelHeads}  # by the name saved


def save_head(head: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (kind,) = (name for name, head_class in KINDS.items() if isinstance(head, head_class))
    weights = {name: weight.bfloat16() for name, weight in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"kind": kind} | head.settings, indent=1) + "\n", encoding="utf-8")


def load_head(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The head that `save_head` wrote to `folder`."""
    folder = Path(folder)
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    head = KINDS[settings.pop("kind")](**settings)
    head.load_state_dict(load_file(folder / WEIGHTS))
    return head.to(dtype).eval()


def last_hidden_state(context: Context) -> Tensor:
    """The state `(rows, width)` from which the newest token was sampled; 0 for a row of one token."""
    assert context.hidden_states is not None
    at = (context.lengths - 2)[:, None, None]
    states = context.hidden_states.take_along_dim(at.clamp_min(0), dim=1)
    return states.where(at >= 0, 0.0)[:, 0]


class WithoutCache(AttentionDrafter):
    """Draft tokens from a head that reads the last hidden state, and no tokens before it."""

    may_be_left_out = False

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings, capturable=True)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        return


class FeatureDrafter(WithoutCache):
    """Draft tokens sampled one after the other from a `RecurrentHead`, which continues the last
    hidden state."""

    def first_state(self, context: Context, drafted: int) -> Tensor:
        state = last_hidden_state(context).to(self.head.scale.dtype)
        return self.next_state(state, context.newest, context.lengths - 1)

    def next_state(self, state: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return self.head(state, self.embedding(token))  # type: ignore[no-any-return]


class ParallelHeadsDrafter(WithoutCache):
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
        return self.q(self.head(last_hidden_state(context).to(self.head.scale.dtype)))
