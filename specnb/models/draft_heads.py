"""Small networks that draft from the target's last hidden state, with the target's own embeddings and output head.

    RecurrentHead   continues the hidden state token by token, so that a draft token depends on those before it
    ParallelHeads   one network for each position, so that all draft tokens come from one call

`state` is the input of the target's output head at the token before the newest one: the newest was sampled from it.
"""

from __future__ import annotations

import json
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

    The recurrent draft of ReDrafter (arXiv:2403.09919) and, with other layers, of Hydra (arXiv:2402.05109). EAGLE
    (arXiv:2401.15077) has a transformer layer in its place, which also sees the states before.

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


KINDS: dict[str, type[RecurrentHead] | type[ParallelHeads]] = {
    "recurrent": RecurrentHead, "parallel": ParallelHeads,
}  # fmt: skip


def save_head(head: RecurrentHead | ParallelHeads, folder: Path) -> None:
    """Writes the weights in bfloat16, the settings, and their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    (kind,) = (name for name, made in KINDS.items() if isinstance(head, made))
    save_file({name: weight.bfloat16() for name, weight in head.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"kind": kind} | head.settings, indent=1) + "\n", encoding="utf-8")
    write_checksums(folder)


def load_head(folder: Path, dtype: torch.dtype = torch.float32) -> RecurrentHead | ParallelHeads:
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
