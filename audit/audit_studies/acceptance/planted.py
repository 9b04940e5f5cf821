"""Mistakes in serving a draft, planted in the decoding loop or in the files of a draft.

Nothing here is taken from what `specnb_audit` tries: configurations are edited on disk, hooks change
what a module reads, a batch hands the drafter another context, and draft models run without a cache.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specnb.cache import CachedModel
from specnb.distributions import Sampling, sample, standardise
from specnb.drafters import Context, Drafter, ModelDrafter, Proposal
from specnb.heads import AttentionDrafter
from specnb.loading import TRAINED_PAIR, Pair
from specnb.released import load_drafter
from specnb.rules import Outcome
from specnb.step import Batch

CONFIG, WEIGHTS = "config.json", "model.safetensors"
GAMMA, COOLER = 3, Sampling(0.7)
FORGOTTEN = "the last draft token is missing in the draft's cache after full acceptance"
Change = Callable[[Any, Tensor, Tensor], Tensor]  # of a norm, what it is given and what it returns


@dataclass(frozen=True)
class Planted:
    """A mistake as an engine makes it.

    name      as `explain_acceptance` should call it; "no mistake" for none
    drafter   what drafts in the loop
    batch     makes the steps
    prompts   what the engine makes of the prompts
    others    what `explain_acceptance` is given beside the draft
    """

    name: str
    drafter: Drafter
    batch: type[Batch] = Batch
    prompts: Callable[[list[int]], list[int]] = list
    target: Any = None
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def of_draft(draft: str, pair: Pair, sampling: Sampling, work: Path) -> tuple[Drafter, Iterator[Planted]]:
    """The drafter that `explain_acceptance` is given, and the mistakes to plant."""
    if draft == "model":
        given = ModelDrafter(pair.draft, sampling)
        return given, (of_model_cooler(pair) if sampling == COOLER else of_model(pair))
    folder = TRAINED_PAIR / f"draft-{draft.removesuffix('-map')}"
    if draft.endswith("-map"):
        folder = with_map(folder, work)
    made = load_drafter(pair.target, folder, sampling)
    of = of_head_cooler if sampling != Sampling() else of_map if draft.endswith("-map") else of_head
    return made, of(pair, folder, work, sampling)


# Files


def edited(folder: Path, work: Path, layer: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A copy of the head in `folder` whose configuration, and that of its `layer`, have `changes`."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["transformer_layer_config"] |= layer or {}
    place = work / f"{folder.name}-{len(list(work.iterdir()))}"
    place.mkdir()
    (place / CONFIG).write_text(json.dumps(config | changes), encoding="utf-8")
    (place / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    return place


def with_map(folder: Path, work: Path) -> Path:
    """The head with three of four tokens that it can draft, and the map d2t."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    weights = load_file(folder / WEIGHTS)
    vocab = len(weights["lm_head.weight"])
    kept = torch.tensor([token for token in range(vocab) if token % 4 != 3])
    weights["lm_head.weight"] = weights["lm_head.weight"][kept].contiguous()
    weights["d2t"], weights["t2d"] = kept - torch.arange(len(kept)), torch.isin(torch.arange(vocab), kept)
    place = work / f"{folder.name}-map"
    place.mkdir(parents=True, exist_ok=True)
    save_file(weights, place / WEIGHTS, metadata={"format": "pt"})
    (place / CONFIG).write_text(json.dumps(config | {"draft_vocab_size": len(kept)}), encoding="utf-8")
    return place


# Draft models, without a cache


class Cacheless(Drafter):
    """Draft tokens from `model`, which reads the whole sequence for each.

    `behind`: after a rejection the newest token is not read in the next step. `forgets`: the last
    draft token is not read any more after full acceptance. `skips`: nor is the first token, ever.
    """

    def __init__(self, model: Any, behind: bool = False, forgets: bool = False, skips: bool = False) -> None:
        self.model, self.vocab = model, model.config.vocab_size
        self.behind, self.forgets, self.skips = behind, forgets, skips

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.reads = torch.ones_like(context.tokens)
        self.reads[:, 0] = 0 if self.skips else 1
        self.late = torch.zeros_like(context.lengths)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        tokens, lengths, self.gamma = context.tokens.clone(), context.lengths - self.late, uniforms.shape[1]
        found: list[Tensor] = []
        q: list[Tensor] = []
        for uniform in uniforms.unbind(dim=1):
            seen = tokens[:, : int(lengths.max())]
            logits = self.model(
                input_ids=seen, attention_mask=self.reads[:, : seen.shape[1]],
                position_ids=torch.arange(seen.shape[1]).expand_as(seen), use_cache=False,
            ).logits  # fmt: skip
            q.append(standardise(logits[torch.arange(len(seen)), lengths - 1]))
            found.append(sample(q[-1], uniform))
            tokens[torch.arange(len(tokens)), lengths] = found[-1]
            lengths += 1
        return Proposal(torch.stack(found, dim=1), torch.stack(q, dim=1))

    def update(self, context: Context, outcome: Outcome) -> None:
        full = outcome.accepted == self.gamma
        if self.behind:
            self.late = (~full).long()
        if self.forgets:
            self.reads[full.nonzero()[:, 0], context.lengths[full] - 2] = 0


class Greedy(ModelDrafter):
    """The most probable tokens, with the q of sampled ones."""

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return probs.argmax(dim=-1)


class GreedyHead(AttentionDrafter):
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return self.in_turn(context, uniforms.shape[1], lambda position, q: q.argmax(dim=-1))


def handing(drafter: Drafter, power: float) -> Drafter:
    """`drafter`, which hands its q to the test raised to `power`."""
    sampled = drafter.propose

    def propose(context: Context, uniforms: Tensor) -> Proposal:
        tokens, q = sampled(context, uniforms)
        raised = q**power
        return Proposal(tokens, raised / raised.sum(dim=-1, keepdim=True))

    drafter.propose = propose  # type: ignore[method-assign]
    return drafter


def of_model(pair: Pair) -> Iterator[Planted]:
    model: Any = pair.draft
    yield Planted("greedy drafts, tested as such", ModelDrafter(model, Sampling(0)))
    yield Planted("greedy drafts, tested as sampled ones", Greedy(model))
    changed = copy.deepcopy(model)
    changed.model.rotary_emb.inv_freq = changed.model.rotary_emb.inv_freq ** (6 / 4)  # base 10,000^(6/4)
    yield Planted("positions with a base of 1,000,000", Cacheless(changed))
    yield Planted("the draft model without its final norm", ModelDrafter(hooked(model, lambda norm, x, y: x)))
    twice = hooked(model, lambda norm, x, y: norm.forward(y))
    yield Planted("the draft model with its final norm twice", ModelDrafter(twice))
    yield Planted("the draft is a token behind after a rejection", Cacheless(model, behind=True))
    yield Planted(FORGOTTEN, Cacheless(model, forgets=True))
    yield Planted("the draft does not see the first token", Cacheless(model, skips=True))
    yield Planted("the draft in bfloat16", ModelDrafter(copy.deepcopy(model).bfloat16()))
    yield from of_prompts(lambda: ModelDrafter(model))
    other = perturbed(model, 0.1)
    yield Planted("another draft model", ModelDrafter(other), others={"another draft model": {"draft": other}})
    yield from of_target(pair, lambda target: ModelDrafter(model))


def of_model_cooler(pair: Pair) -> Iterator[Planted]:
    model = pair.draft
    yield Planted("the draft at temperature 1 without filters", ModelDrafter(model))
    yield Planted("temperature and filters in drafting, not in the test", handing(ModelDrafter(model, COOLER), 0.7))
    yield Planted("temperature and filters in the test, not in drafting", handing(ModelDrafter(model), 1 / 0.7))


def of_prompts(drafter: Callable[[], Drafter]) -> Iterator[Planted]:
    yield Planted("the begin token twice", drafter(), prompts=lambda prompt: [prompt[0], *prompt])
    yield Planted("the begin token missing", drafter(), prompts=lambda prompt: prompt[1:])


def of_target(pair: Pair, drafter: Callable[[Any], Drafter]) -> Iterator[Planted]:
    other = perturbed(pair.target, 0.05)
    name = "another checkpoint of the target"
    yield Planted(name, drafter(other), target=other, others={name: {"target": other}})


def hooked(model: Any, change: Change) -> Any:
    made = copy.deepcopy(model)
    made.model.norm.register_forward_hook(lambda norm, given, result: change(norm, given[0], result))
    return made


@torch.no_grad()
def perturbed(model: Any, by: float) -> Any:
    """A copy whose matrices have noise of so many of their own standard deviations."""
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for weight in made.parameters():
        if weight.ndim > 1:
            weight += by * weight.std() * torch.randn(weight.shape, generator=generator)
    return made


# Heads


def of_head(pair: Pair, folder: Path, work: Path, sampling: Sampling) -> Iterator[Planted]:
    target: Any = pair.target

    def load(place: Path = folder, sampling: Sampling = sampling) -> AttentionDrafter:
        return load_drafter(target, place, sampling)

    last = target.config.num_hidden_layers
    eagle3 = load().head.hidden_layers != (-1,)
    if eagle3:
        layers = list(load().head.hidden_layers)
        for name, numbers in (
            ("states of the layers before", [layer - 1 for layer in layers]),
            ("states of the layers in reverse order", layers[::-1]),
        ):
            yield Planted(name, load(edited(folder, work, eagle_aux_hidden_state_layer_ids=numbers)))
        yield Planted("states of the layers after", reading(load(), [layer + 1 for layer in layers]))
        for flag in ("norm_before_residual", "norm_output"):
            value = not load().head.settings[flag]
            changed: dict[str, Any] = {flag: value}
            yield Planted(f"{flag} is {value}", load(edited(folder, work, **changed)))
        norm = target.model.norm
        after = changing(lambda batch, states: torch.cat([norm(one) for one in states.chunk(3, dim=-1)], dim=-1))
        yield Planted("states after the final norm", load(), after)
    else:
        yield Planted("states of the layers before", reading(load(), [last - 1]))
        yield Planted("states before the final norm", load(), BeforeNorm)
    yield Planted("states of a token too early", load(), changing(lambda batch, states: states.roll(1, dims=1)))
    yield Planted("tokens not shifted against the states", load(), NotShifted)
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    yield Planted("positions with a base of 1,000,000", load(edited(folder, work, {"rope_parameters": rope})))
    for name in norms_of(load().head):
        short = name.removeprefix("layers.0.").removeprefix("mtp_layers.0.")
        yield Planted(f"the head's {short} missing", with_norm(load(), name, lambda norm, x, y: x))
    final = "norm" if eagle3 else "mtp_layers.0.final_layernorm"
    twice = with_norm(load(), final, lambda norm, x, y: norm.forward(y))
    yield Planted(f"the head's {final.rpartition('.')[2]} applied twice", twice)
    yield Planted("the first token enters the head", masked(load(), first_shown))
    yield Planted("positions stay where the draft began", staying(load()))
    yield Planted("the draft is a token behind after a rejection", wider(load()), Late)
    yield Planted(FORGOTTEN, masked(forgetful(load()), without_entries))
    yield Planted("greedy drafts, tested as such", load(sampling=Sampling(0)))
    yield Planted("greedy drafts, tested as sampled ones", GreedyHead(target, load().head))
    yield from of_prompts(load)
    other = load()
    other.embedding = perturbed(other.embedding, 0.5)
    again = load()
    again.embedding = other.embedding
    yield Planted("another embedding", other, others={"another embedding": {"draft": again}})
    coarse = changing(lambda batch, states: rounded(states))
    yield Planted("states with 3 bits", load(), coarse, others={"states with 3 bits": {"draft": Rounded(load())}})
    yield from of_target(pair, lambda model: load_drafter(model, folder, sampling))


def of_head_cooler(pair: Pair, folder: Path, work: Path, sampling: Sampling) -> Iterator[Planted]:
    """At temperature 0."""
    chosen = (
        "states of the layers before", "states of the layers after", "states of a token too early",
        "tokens not shifted against the states", "positions with a base of 1,000,000",
        "the draft is a token behind after a rejection", "positions stay where the draft began",
    )  # fmt: skip
    yield from (one for one in of_head(pair, folder, work, sampling) if one.name in chosen)


def of_map(pair: Pair, folder: Path, work: Path, sampling: Sampling) -> Iterator[Planted]:
    for name, tokens in (
        ("d2t read as tokens", lambda drafter: drafter.head.d2t),
        ("draft tokens not mapped", lambda drafter: torch.arange(len(drafter.head.d2t))),
    ):
        made = load_drafter(pair.target, folder, sampling)
        yield Planted(name, mapped_by(made, tokens(made)))


def mapped_by(drafter: AttentionDrafter, tokens: Tensor) -> AttentionDrafter:
    def q(features: Tensor) -> Tensor:
        probs = standardise(drafter.output(features))
        return torch.zeros(*probs.shape[:-1], drafter.vocab).scatter_add_(-1, tokens.expand(probs.shape), probs)

    drafter.q = q  # type: ignore[method-assign]
    return drafter


def norms_of(head: nn.Module) -> list[str]:
    return [name for name, part in head.named_modules() if type(part).__name__.endswith("RMSNorm")]


def with_norm(drafter: AttentionDrafter, name: str, change: Change) -> AttentionDrafter:
    norm = drafter.head.get_submodule(name)
    norm.register_forward_hook(lambda module, given, result: change(module, given[0], result))
    return drafter


def reading(drafter: AttentionDrafter, layers: list[int]) -> AttentionDrafter:
    drafter.hidden_layers = tuple(layers)
    return drafter


def changing(change: Callable[[Any, Tensor], Tensor]) -> type[Batch]:
    class Changed(Batch):
        @property
        def context(self) -> Context:
            found = super().context
            assert found.hidden_states is not None
            return found._replace(hidden_states=change(self, found.hidden_states))

    return Changed


class NotShifted(Batch):
    @property
    def context(self) -> Context:
        found = super().context
        moved = found.tokens.roll(1, dims=1)
        moved[:, 0] = found.tokens[:, 0]
        return found._replace(tokens=moved)


class Late(Batch):
    """After a rejection the drafter sees the sequence without its newest token."""

    @property
    def context(self) -> Context:
        found, state = super().context, self.state
        before = state.record[state.rows, (state.steps - 1).clamp_min(0), state.gamma]
        late = (state.steps > 0) & (before < state.gamma)
        return found._replace(lengths=found.lengths - late.long(), bound=None)


class RawStates(CachedModel):
    def run(self, *given: Any, **named: Any) -> Tensor:
        kept: list[Tensor] = []
        norm: Any = self.model.base_model.norm
        hook = norm.register_forward_pre_hook(lambda norm, x: kept.append(x[0]))
        logits = super().run(*given, **named)
        hook.remove()
        if self.hidden_states is not None:
            self.hidden_states[self.cache.index] = kept[-1]
        return logits


class BeforeNorm(Batch):
    runner_class = RawStates


def rounded(states: Tensor) -> Tensor:
    """Each state in 3 bits, -3 to 3 times a third of its largest entry."""
    step = states.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 3
    return (states / step).round() * step


class Rounded(Drafter):
    """`drafter` on rounded states."""

    def __init__(self, drafter: AttentionDrafter) -> None:
        self.drafter, self.vocab, self.hidden_layers = drafter, drafter.vocab, drafter.hidden_layers

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(self.read(context), rows)

    def read(self, context: Context) -> Context:
        assert context.hidden_states is not None
        return context._replace(hidden_states=rounded(context.hidden_states))

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return self.drafter.propose(self.read(context), uniforms)

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        return self.drafter.along(self.read(context), tokens)


def attention_of(drafter: AttentionDrafter) -> Any:
    head: Any = drafter.head
    return (head.layers if hasattr(head, "layers") else head.mtp_layers)[0].self_attn


def masked(drafter: AttentionDrafter, seen: Callable[..., Tensor]) -> AttentionDrafter:
    """`drafter`, whose layer reads what `seen` makes of its mask."""

    def changed(module: Any, given: Any, named: dict[str, Any]) -> Any:
        mask, slots = named["attention_mask"], named["position_ids"]
        named["attention_mask"] = seen(mask.clone(), drafter, slots)
        return given, named

    attention_of(drafter).register_forward_pre_hook(changed, with_kwargs=True)
    return drafter


def first_shown(mask: Tensor, drafter: Any, slots: Tensor) -> Tensor:
    mask[..., 0] = 0
    return mask


def without_entries(mask: Tensor, drafter: Any, slots: Tensor) -> Tensor:
    for row, slot in drafter.forgotten:
        mask[row, :, slots[row] > slot, slot] = torch.finfo(mask.dtype).min
    return mask


def forgetful(drafter: Any, gamma: int = GAMMA) -> Any:
    """`drafter`, which notes which slots held the last draft token of a step of which all were accepted."""
    drafter.forgotten = []

    def update(context: Context, outcome: Outcome) -> None:
        for row in (outcome.accepted == gamma).nonzero()[:, 0].tolist():
            drafter.forgotten.append((row, int(context.lengths[row]) - 2))

    drafter.update = update
    return drafter


def staying(drafter: Any) -> Any:
    """`drafter`, whose draft tokens all have the position of the newest token."""
    first_state = drafter.first_state
    newest: list[Tensor] = []

    def begun(context: Context, drafted: int) -> Tensor:
        newest[:] = [context.lengths - 1]
        return first_state(context, drafted)  # type: ignore[no-any-return]

    def clamped(module: Any, given: Any) -> Any:
        embedded, slots = given
        return embedded, torch.minimum(slots, newest[0][:, None]) if newest else slots

    drafter.first_state = begun
    drafter.head.rotary_emb.register_forward_pre_hook(clamped)
    return drafter


def wider(drafter: Any) -> Any:
    """`drafter`, which computes one token more anew in each step."""
    first_state = drafter.first_state
    drafter.first_state = lambda context, drafted: first_state(context, drafted + 1)
    return drafter
