"""Small networks that draft from the target's hidden states, with the target's own embeddings and output head.

    RecurrentHead   continues the last hidden state token by token, so that a draft token depends on those before it
    AttentionHead   a transformer layer that also sees the states and tokens before
    ParallelHeads   one network for each position, so that all draft tokens come from one call

The state of the recurrent head and of the parallel heads begins as the input of the target's output head at the token
before the newest one: the newest was sampled from it. The attention head reads such states of several layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from specnb.models.checkpoints import write_checksums

EPSILON = 1e-6
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class RecurrentHead(nn.Module):
    """state' = state + f(state, embedding of the newest token), in `layers` gated layers of `hidden` units.

    The recurrent draft of ReDrafter (arXiv:2403.09919) and, with other layers, of Hydra (arXiv:2402.05109).

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
        """The state `(..., width)` after one more token, whose embedding is `embedded` `(..., width)`."""
        embedded = _normalised(embedded)
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            both = torch.cat([_normalised(state), embedded], dim=-1)
            state = state + down(silu(gate(both)) * up(both))
        return state

    def features(self, state: Tensor) -> Tensor:
        """The input `(..., width)` of the target's output head, for the distribution of the next token."""
        return _normalised(state) * self.scale


class AttentionHead(nn.Module):
    """One transformer layer over pairs of a token's embedding and the target's states at the token before it.

    The draft of EAGLE (arXiv:2401.15077), with states of several layers as in EAGLE-3 (arXiv:2503.01840): `layers` of
    the target, numbered as in `output_hidden_states` of transformers. For a token that the target has not computed yet,
    the head's own state is used. In place of positions, the distance to a token times a slope is subtracted from its
    attention score, with a slope for each of the `heads` (Press et al., arXiv:2108.12409); here `heads // 2` are 0.

    >>> head = AttentionHead(width=8, hidden=16, heads=2, layers=(1, -1))
    >>> states = head.combined(torch.ones(3, 5, 16))
    >>> head(states, torch.ones(3, 5, 8), lambda query, key, value: value).shape
    torch.Size([3, 5, 8])
    """

    slopes: Tensor

    def __init__(self, width: int, hidden: int, heads: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.settings = {"width": width, "hidden": hidden, "heads": heads, "layers": list(layers)}
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

    def combined(self, states: Tensor) -> Tensor:
        """One state `(..., width)` of the target's states `(..., layers * width)`."""
        each = states.unflatten(-1, (len(self.layers), -1))
        return self.states_projection(_normalised(each).flatten(-2))  # type: ignore[no-any-return]

    def forward(self, state: Tensor, embedded: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The states `(batch, n, width)` of n tokens with the embeddings `embedded`, given those before them, `state`.

        `attend` gets query, key and value of these tokens, all `(batch, heads, n, width / heads)`, and returns what
        the queries read, of the same shape.
        """
        entered = self.input_projection(torch.cat([_normalised(state), _normalised(embedded)], dim=-1))
        each = self.attention(_normalised(entered)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in each.unbind(dim=2))
        seen = entered + self.output_projection(attend(query, key, value).transpose(1, 2).flatten(2))
        normalised = _normalised(seen)
        return seen + self.down(silu(self.gate(normalised)) * self.up(normalised))  # type: ignore[no-any-return]

    def bias(self, distance: Tensor) -> Tensor:
        """What is added to the scores `(batch, heads, n, slots)` of tokens at `distance` `(batch, n, slots)`.

        For a negative distance, so for a later token, it is the most negative number of the dtype.

        >>> AttentionHead(width=8, hidden=16, heads=2, layers=(-1,)).bias(torch.tensor([[[2, 0]]]))[:, :, 0].tolist()
        [[[-0.0, -0.0], [-2.0, -0.0]]]
        """
        dtype = self.scale.dtype
        near = -self.slopes[:, None, None] * distance[:, None]
        return near.to(dtype).masked_fill_(distance[:, None] < 0, torch.finfo(dtype).min)

    def features(self, state: Tensor) -> Tensor:
        """The input `(..., width)` of the target's output head, for the distribution of the next token."""
        return _normalised(state) * self.scale


class ParallelHeads(nn.Module):
    """`count` heads, one for each draft token: all of them read the same state, as in Medusa (arXiv:2401.10774).

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
        """The inputs `(..., count, width)` of the target's output head, one for each token after the newest."""
        normalised = _normalised(state)
        each = [down(silu(up(normalised))) for up, down in zip(self.ups, self.downs, strict=True)]
        return _normalised(state[..., None, :] + torch.stack(each, dim=-2)) * self.scale


Head = RecurrentHead | AttentionHead | ParallelHeads
KINDS: dict[str, type[Head]] = {"recurrent": RecurrentHead, "attention": AttentionHead, "parallel": ParallelHeads}


def save_head(head: Head, folder: Path) -> None:
    """Writes the weights in bfloat16, the settings, and their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    (kind,) = (name for name, made in KINDS.items() if isinstance(head, made))
    save_file({name: weight.bfloat16() for name, weight in head.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"kind": kind} | head.settings, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)


def load_head(folder: Path, dtype: torch.dtype = torch.float32) -> Head:
    """The head that `save_head` wrote to `folder`.

    Raises `ValueError` for another kind of head, `OSError` for a file that is not there, and what torch raises for
    weights that do not fit.

    >>> import tempfile
    >>> save_head(ParallelHeads(8, 16, 3), folder := Path(tempfile.mkdtemp()))
    >>> load_head(folder).settings
    {'width': 8, 'hidden': 16, 'count': 3}
    """
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    kind = settings.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"{folder} holds a head of kind {kind!r}; it must be one of {', '.join(KINDS)}")
    head = KINDS[kind](**settings)
    head.load_state_dict(load_file(folder / WEIGHTS))
    return head.to(dtype).eval()


def _normalised(values: Tensor) -> Tensor:
    return rms_norm(values, values.shape[-1:], eps=EPSILON)
