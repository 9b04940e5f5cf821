"""The known mistakes in serving a draft: what an engine does in place of what the draft was trained for.

Each is a drafter that makes the mistake, to be replayed along a log. The user's drafter and models
are not changed: a mistake changes a copy that shares the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specnb.cache import additive_mask, decoder_config
from specnb.distributions import Sampling, standardise
from specnb.drafters import NEWEST, Context, Drafter, ModelDrafter
from specnb.fast import shared_copy
from specnb.heads import AttentionDrafter, Eagle3Head, LayeredHead
from specnb.rules import Outcome
from specnb_audit.draft_replay import Served, Text, final_norm

# Norms of a head that stand at its ends, where the engine may have one of its own
TWICE = ("norm", "final_layernorm", "hidden_norm", "hidden_layernorm")
BASES = (10_000.0, 1_000_000.0)  # of rotary positions: the usual default, and the usual one of long contexts


def known_mistakes(target: PreTrainedModel, drafter: Drafter, sampling: Sampling) -> Iterator[Served]:
    """The mistakes that this drafter can be served with."""
    given = getattr(drafter, "sampling", None)
    if not isinstance(drafter, ModelDrafter | AttentionDrafter) or drafter.parents is not None:
        return
    yield from _sampled_otherwise(target, drafter, sampling, given)
    if isinstance(drafter, ModelDrafter):
        yield from _of_model(drafter)
        one, other = (_again(drafter, WholeStep, drafter.model) for _ in range(2))
        yield from _of_loop(one, WithoutEntry(other))
    elif isinstance(drafter.head, LayeredHead):
        yield from _of_states(target, drafter)
        yield from _of_head(target, drafter)
        yield from _of_loop(drafter, WithoutEntry(_with_inputs(drafter)))


# Sampling


def _sampled_otherwise(
    target: PreTrainedModel, drafter: ModelDrafter | AttentionDrafter, sampling: Sampling, given: Any
) -> Iterator[Served]:
    at_one, greedy = _with_sampling(drafter, Sampling()), _with_sampling(drafter, Sampling(0))
    drafting, testing = "how the engine samples draft tokens", "which q the rejection test is given"
    if given.temperature > 0:
        yield Served("greedy drafts, tested as such", drafting, greedy)
        yield Served("greedy drafts, tested as sampled ones", f"{testing}: one-hot for a greedy draft", greedy, drafter)
    if given != Sampling():
        yield Served("the draft at temperature 1 without filters", f"{drafting}: temperature and filters", at_one)
    if given != Sampling() and given.temperature > 0:
        yield Served("temperature and filters in drafting, not in the test", testing, drafter, at_one)
        yield Served("temperature and filters in the test, not in drafting", drafting, at_one, drafter)
    if sampling != Sampling():
        name = "the target at temperature 1 without filters"
        yield Served(name, "how the engine samples the target", drafter, sampling=Sampling())


def _with_sampling(drafter: Any, sampling: Sampling) -> Any:
    made = copy.copy(drafter)
    made.sampling, made.allocated = sampling, ()
    return made


# The loop


def _of_loop(drafter: Any, without_entry: Drafter) -> Iterator[Served]:
    yield Served(
        "the draft is a token behind after a rejection",
        "what the draft's cache is cropped to after a rejection, and that it is given the recovered token",
        Behind(drafter),
    )
    yield Served(
        "the last draft token is missing in the draft's cache after full acceptance",
        "the pass over the last draft token and the bonus token after full acceptance",
        without_entry,
    )


class WholeStep(ModelDrafter):
    """A draft model that computes the tokens of the last step anew, whatever was in its cache."""

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        newest, slots = self._newest(context.tokens, context.lengths, NEWEST + width)
        ahead = context.lengths[:, None] + torch.arange(width - 1, device=slots.device)
        slots = torch.cat([slots, ahead], dim=1)
        logits = self.runner.run(torch.cat([newest, tokens[:, :-1]], 1), slots, width, visible=self.visible(slots))
        return standardise(logits, self.sampling, check=False)

    holes: Tensor | None = None

    def visible(self, slots: Tensor) -> Tensor | None:
        if self.holes is None:
            return None
        return _visible(slots, self.runner.capacity, self.holes)


class Behind(Drafter):
    """After a rejection the newest token has not reached the draft, which then proposes from the text before it."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.vocab, self.hidden_layers = drafter, drafter.vocab, drafter.hidden_layers

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(context, rows)
        self.behind = torch.zeros_like(context.lengths)

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        self.width = tokens.shape[1]
        # One token more is computed anew: the last step wrote the entries of its tokens a slot too early.
        context = context._replace(lengths=context.lengths - self.behind)
        return self.drafter.along(context, pad(tokens, (0, 1)))[:, : self.width]  # type: ignore[no-any-return]

    def update(self, context: Context, outcome: Outcome) -> None:
        self.behind = (outcome.accepted < self.width).to(self.behind)


class WithoutEntry(Drafter):
    """After full acceptance the last draft token, which no pass of the draft has read, stays out of its cache."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.vocab, self.hidden_layers = drafter, drafter.vocab, drafter.hidden_layers

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.holes = torch.zeros_like(context.tokens, dtype=torch.bool)
        self._of_pass().holes = self.holes
        self.drafter.start(context, rows)

    def _of_pass(self) -> Any:
        return self.drafter if isinstance(self.drafter, ModelDrafter) else self.drafter.head.passed

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        self.width = tokens.shape[1]
        return self.drafter.along(context, tokens)  # type: ignore[no-any-return]

    def update(self, context: Context, outcome: Outcome) -> None:
        full = (outcome.accepted == self.width)[:, None]
        at = (context.lengths[:, None] - 2).clamp_min(0)
        self.holes.scatter_(1, at, self.holes.gather(1, at) | full)


def _visible(slots: Tensor, seen: int, holes: Tensor) -> Tensor:
    at = torch.arange(seen, device=slots.device)
    return (at <= slots[..., None]) & (~holes[:, None, :seen] | (at == slots[..., None]))


# A draft model


def _of_model(drafter: ModelDrafter) -> Iterator[Served]:
    model: Any = drafter.model

    def served(name: str, mend: str, changed: Any) -> Served:
        return Served(name, mend, _again(drafter, ModelDrafter, changed))

    yield from (served(name, mend, changed) for name, mend, changed in _turned(model, model.base_model))
    if (norm := _name_of(final_norm(model), model.base_model)) is not None:
        for times, name in ((0, "without its final norm"), (2, "with its final norm twice")):
            changed = shared_copy(model)
            _repeat(changed.base_model, norm, times)
            yield served(f"the draft model {name}", "the final norm of the draft model", changed)
    yield Served("the draft does not see the first token", "what the draft's cache begins with", FirstDropped(drafter))
    for dtype in _lower(model.dtype):
        changed = copy.deepcopy(model).to(dtype)
        yield served(f"the draft in {_word(dtype)}", "the dtype in which the draft is loaded", changed)


def _again(drafter: ModelDrafter, kind: type[ModelDrafter], model: Any) -> Any:
    made = kind(model, drafter.sampling)
    made.token_map, made.vocab = drafter.token_map, drafter.vocab
    return made


class FirstDropped(Drafter):
    """The draft is given the sequence without its first token; a sequence of one token stays."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter, self.vocab = _again(drafter, ModelDrafter, drafter.model), drafter.vocab

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.dropped = (context.lengths > 1).to(context.lengths)
        self.drafter.start(self.shorter(context), rows)

    def shorter(self, context: Context) -> Context:
        slots = torch.arange(context.tokens.shape[1], device=context.tokens.device) + self.dropped[:, None]
        tokens = context.tokens.gather(1, slots.clamp_max(context.tokens.shape[1] - 1))
        return context._replace(tokens=tokens, lengths=context.lengths - self.dropped)

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        return self.drafter.along(self.shorter(context), tokens)  # type: ignore[no-any-return]


# The hidden states of the target


def _of_states(target: PreTrainedModel, drafter: AttentionDrafter) -> Iterator[Served]:
    last = decoder_config(target).num_hidden_layers
    layers = [int(one % (last + 1)) for one in drafter.hidden_layers]  # from 0, the embeddings
    numbers = "the numbers of the layers whose states the draft reads (eagle_aux_hidden_state_layer_ids)"
    for by, name in ((-1, "before"), (1, "after")):
        moved = [layer + by for layer in layers]
        if min(moved) >= 0 and max(moved) <= last:
            yield Served(f"states of the layers {name}", numbers, drafter, states=partial(Text.states, layers=moved))
    norm = final_norm(target)
    if last in layers and norm is not None:
        yield Served(
            "states before the final norm", "whether the states are taken before or after the target's final norm",
            drafter, states=lambda text: _before_norm(text, layers, last),
        )  # fmt: skip
    if max(layers) < last and norm is not None:
        yield Served(
            "states after the final norm", "whether the states are taken before or after the target's final norm",
            drafter, states=lambda text: torch.cat([norm(text.hidden[layer]) for layer in layers], dim=-1),
        )  # fmt: skip
    if len(layers) > 1:
        yield Served(
            "states of the layers in reverse order", "the order in which states are concatenated", drafter,
            states=lambda text: text.states(layers[::-1]),
        )  # fmt: skip
    paired = "which state a token enters with: that of the token before it"
    yield Served(
        "states of a token too early", paired, drafter,
        states=lambda text: pad(text.states(layers), (0, 0, 1, 0))[:, :-1],
    )  # fmt: skip
    yield Served("tokens not shifted against the states", paired, NotShifted(drafter))


def _before_norm(text: Text, layers: list[int], last: int) -> Tensor:
    assert text.before_norm is not None
    return torch.cat([text.before_norm if layer == last else text.hidden[layer] for layer in layers], dim=-1)


class NotShifted(Drafter):
    """Each token enters with its own state, so that the newest one, which has none yet, does not enter."""

    def __init__(self, drafter: AttentionDrafter) -> None:
        self.drafter, self.vocab, self.hidden_layers = drafter, drafter.vocab, drafter.hidden_layers

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(self.shifted(context), rows)

    def shifted(self, context: Context) -> Context:
        return context._replace(tokens=torch.cat([context.tokens[:, :1], context.tokens[:, :-1]], dim=1))

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        return self.drafter.along(self.shifted(context), tokens)


# A head


def _of_head(target: PreTrainedModel, drafter: AttentionDrafter) -> Iterator[Served]:
    head: Any = drafter.head
    for name, mend, changed in _turned(head, head, decoder_config(target).rope_parameters):
        yield Served(name, mend, _with_head(drafter, changed))
    for name, module in head.named_modules():
        if isinstance(module, head.norm_class | nn.RMSNorm) and not name.startswith("fc_norm."):
            short = name.removeprefix("layers.0.").removeprefix("mtp_layers.0.")
            for times, word in ((0, "missing"), (2, "applied twice")):
                if times == 2 and short not in TWICE:
                    continue
                changed = shared_copy(head)
                _repeat(changed, name, times)
                yield Served(f"the head's {short} {word}", f"{name} of the head", _with_head(drafter, changed))
    if isinstance(head, Eagle3Head):
        yield from _of_eagle3(target, drafter, head)
    yield Served("the first token enters the head", "the mask of the head: the first token has no state before it",
                 _with_inputs(drafter, first=True))  # fmt: skip
    yield Served("positions stay where the draft began", "the positions of the second draft token and later ones",
                 PositionsStay(_with_inputs(drafter)))  # fmt: skip
    for dtype in _lower(drafter.dtype):
        yield Served(
            f"the draft in {_word(dtype)}", "the dtype in which the draft is loaded", _in_dtype(drafter, dtype)
        )


def _of_eagle3(target: PreTrainedModel, drafter: AttentionDrafter, head: Any) -> Iterator[Served]:
    for flag in ("norm_before_residual", "norm_output"):
        changed = shared_copy(head)
        setattr(changed, flag, not getattr(head, flag))
        yield Served(
            f"{flag} is {getattr(changed, flag)}", f"{flag} in the head's configuration", _with_head(drafter, changed)
        )
    if "fc_norm" in dict(head.named_children()):
        changed = shared_copy(head)
        changed.settings = head.settings | {"fc_norm": False}
        yield Served("the head's fc_norm missing", "fc_norm of the head", _with_head(drafter, changed))
    if head.d2t is not None:
        yield Served(
            "d2t read as tokens", "d2t of the head: token i of the draft is token i + d2t[i] of the target",
            _with_tokens(drafter, head.d2t),
        )  # fmt: skip
        yield Served(
            "draft tokens not mapped", "d2t of the head: token i of the draft is token i + d2t[i] of the target",
            _with_tokens(drafter, torch.arange(len(head.d2t), device=head.d2t.device)),
        )  # fmt: skip
    if head.embed_tokens is not None and head.embed_tokens.weight.shape == target.get_input_embeddings().weight.shape:
        made = _copied(drafter)
        made.embedding = target.get_input_embeddings()
        yield Served("the target's embedding in place of the head's", "embed_tokens of the head", made)


def _copied(drafter: AttentionDrafter) -> Any:
    made: Any = copy.copy(drafter)
    made.allocated = ()
    return made


def _with_head(drafter: AttentionDrafter, head: Any) -> Any:
    made = _copied(drafter)
    made.head = head
    return made


def _with_tokens(drafter: AttentionDrafter, tokens: Tensor) -> Any:
    made = copy.copy(drafter)
    made.__class__ = Mapped
    made.allocated, made.proposed = (), tokens.clamp(0, drafter.vocab - 1)
    return made


class Mapped(AttentionDrafter):
    """A drafter of which several draft tokens may be one of the target's."""

    def q(self, features: Tensor) -> Tensor:
        q = standardise(self.output(features), self.sampling, check=False)
        return q.new_zeros(*q.shape[:-1], self.vocab).index_add_(-1, cast(Tensor, self.proposed), q)


def _in_dtype(drafter: AttentionDrafter, dtype: torch.dtype) -> Any:
    made = _with_head(drafter, copy.deepcopy(drafter.head).to(dtype))
    made.dtype = dtype
    embedding, output = drafter.embedding, drafter.output
    made.embedding = lambda tokens: embedding(tokens).to(dtype)
    own = getattr(made.head, "lm_head", None) or copy.deepcopy(output).to(dtype)
    made.output = own
    return made


def _with_inputs(drafter: AttentionDrafter, first: bool = False) -> Any:
    changed: Any = shared_copy(drafter.head)
    changed.passed = Inputs(changed, first)
    return _with_head(drafter, changed)


class Inputs:
    """In place of `LayeredHead.passed`: whether the first token is seen, entries that are missing, and where
    positions end."""

    def __init__(self, head: Any, first: bool) -> None:
        self.rotary, self.first = head.rotary_emb, first
        self.holes: Tensor | None = None
        self.latest: Tensor | None = None

    def __call__(self, embedded: Tensor, slots: Tensor, cache: Any) -> dict[str, Any]:
        holes = slots.new_zeros(len(slots), cache.seen, dtype=torch.bool) if self.holes is None else self.holes
        visible = _visible(slots, cache.seen, holes)
        if not self.first:
            visible &= (torch.arange(cache.seen, device=slots.device) > 0) | (slots[..., None] == 0)
        positions = slots if self.latest is None else torch.minimum(slots, self.latest[:, None])
        return {
            "attention_mask": additive_mask(visible, embedded.dtype),
            "position_embeddings": self.rotary(embedded, positions),
            "position_ids": positions,
            "past_key_values": cache,
        }


class PositionsStay(Drafter):
    """All draft tokens of a step have the position of the newest token."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.vocab, self.hidden_layers = drafter, drafter.vocab, drafter.hidden_layers

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.head.passed.latest = None
        self.drafter.start(context, rows)

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        self.drafter.head.passed.latest = context.lengths - 1
        return self.drafter.along(context, tokens)  # type: ignore[no-any-return]


# Parts of models


def _turned(model: Any, holder: Any, others: Any = None) -> Iterator[tuple[str, str, Any]]:
    """Copies of `model` with another base of its positions, or without their scaling; `others` are the target's."""
    config, rotary = model.config, getattr(holder, "rotary_emb", None)
    own = getattr(config, "rope_parameters", None)
    if rotary is None or not isinstance(own, dict) or "rope_theta" not in own:
        return
    bases = {base: f"positions with a base of {base:,.0f}" for base in BASES}
    if isinstance(others, dict) and "rope_theta" in others:
        bases[others["rope_theta"]] = f"positions with the target's base of {others['rope_theta']:,.0f}"
    wanted = [(name, own | {"rope_theta": base}) for base, name in bases.items() if base != own["rope_theta"]]
    if own.get("rope_type", "default") != "default":
        wanted.append(("positions without their scaling", {"rope_theta": own["rope_theta"], "rope_type": "default"}))
    for name, parameters in wanted:
        changed = shared_copy(model)
        settings = copy.deepcopy(config)
        settings.rope_parameters = parameters
        place = changed if holder is model else changed.base_model
        place.rotary_emb = type(rotary)(settings).to(rotary.inv_freq.device)
        yield name, "rope_theta and rope_scaling in the draft's configuration", changed


def _repeat(model: nn.Module, name: str, times: int) -> None:
    """Apply the part `name` of `model` so many times, 0 or 2."""
    parent, _, last = name.rpartition(".")
    part = model.get_submodule(name)
    setattr(model.get_submodule(parent), last, nn.Sequential(*[part] * times))


def _name_of(part: Any, model: nn.Module) -> str | None:
    return next((name for name, one in model.named_children() if one is part), None)


def _lower(dtype: torch.dtype) -> list[torch.dtype]:
    return [one for one in (torch.bfloat16, torch.float16) if one != dtype]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
