"""The settings that an engine claims: `Sampling`, filters in the engine's own order, and penalties.

Top-p keeps more tokens at a higher temperature, so their order matters. Engines differ in it, and
each is exact for its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specnb.distributions import Sampling, standardise
from specnb_audit.penalties import NO_PENALTIES, Penalties, twice
from specnb_audit.setting_names import APPLIED, DECLARED, ENGINE_ORDERS, FILTERS, INSTEAD, NOT_AUDITED, PENALTIES


@dataclass(frozen=True)
class Claimed(Sampling):
    """`Sampling` with an order of the filters, and penalties.

    Parameters
    ----------
    order : tuple of str
        The filters in the order in which they are applied; those left out come last.
    penalties : Penalties
        Changes of the target's logits that depend on the tokens before, applied before all filters.

    Examples
    --------
    >>> sampling = Claimed(0.7, min_p=0.05, order=("min-p", "temperature"))
    """

    order: tuple[str, ...] = FILTERS
    penalties: Penalties = NO_PENALTIES

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.order)) < len(self.order) or not set(self.order) <= set(FILTERS):
            allowed = f"each of {', '.join(FILTERS)} at most once, or one of {', '.join(ENGINE_ORDERS)}"
            raise ValueError(f"the order of filters is {', '.join(self.order)}; give {allowed}")
        rest = tuple(name for name in FILTERS if name not in self.order)
        object.__setattr__(self, "order", (*self.order, *rest))


def penalties_of(sampling: Sampling) -> Penalties:
    return sampling.penalties if isinstance(sampling, Claimed) else NO_PENALTIES


def claimed_sampling(settings: Mapping[str, Any], order: str | Sequence[str] = "transformers") -> Sampling:
    """The `Sampling` of an engine's `settings`; `order` is a name in `ENGINE_ORDERS`, or the
    filters'.

    `settings` are those of `Sampling` and `Penalties`, and those of `NOT_AUDITED` with the value
    that switches them off. Raises `ValueError` for any other: a claim that is left out would be
    found as a deviation.

    >>> claimed_sampling({"temperature": 0.7, "top_k": 0})
    Sampling(temperature=0.7, top_k=None, top_p=1.0, min_p=0.0)
    >>> claimed_sampling({"typical_p": 0.9})
    Traceback (most recent call last):
        ...
    ValueError: typical_p is 0.9; the audit cannot claim it: generate with typical_p=1, or give specnb_audit.audit ...
    """
    for name, value in settings.items():
        if name in NOT_AUDITED and not _is_off(value, NOT_AUDITED[name]):
            off = (
                f"generate with {name}={NOT_AUDITED[name]}" if NOT_AUDITED[name] is not None else "generate without it"
            )
            applied = INSTEAD.format(applied=f" ({APPLIED[name]})" if name in APPLIED else "")
            raise ValueError(f"{name} is {value}; the audit cannot claim it: {off}, {applied}")
        if name == "logprobs":
            raise ValueError(
                "logprobs changes no distribution; leave it out of the settings, and give the numbers to audit as "
                "logprobs=, or in each line of the file"
            )
        if name in DECLARED and value:
            raise ValueError(
                f"{name} belongs to single sequences; declare it in each line of the file, or as Constraints"
            )
        if name not in NOT_AUDITED and name not in (*FIELDS, *PENALTIES, *DECLARED):
            raise ValueError(f"{name} is no setting that the audit knows; leave it out if it changes no distribution")
    given = {name: value for name, value in settings.items() if value is not None}
    chosen = {name: given[name] for name in FIELDS if name in given}
    chosen["top_k"] = None if given.get("top_k") in (0, -1) else given.get("top_k")
    names = ENGINE_ORDERS[order] if isinstance(order, str) and order in ENGINE_ORDERS else _names(order)
    penalties = Penalties(**{name: given[name] for name in PENALTIES if name in given})
    claimed = Claimed(**chosen, order=names, penalties=penalties)
    plain = claimed.order == FILTERS and penalties == NO_PENALTIES
    return Sampling(**chosen) if plain else claimed


FIELDS = tuple(field.name for field in fields(Sampling))
# A filter of `Sampling` that is not among the audit's would be left out of what is claimed: add it to FILTERS, to the
# orders of engines, and to `cutoff_gap`.
assert tuple(name.replace("-", "_") for name in FILTERS) == FIELDS, FIELDS


def _names(order: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in order.split(",")) if isinstance(order, str) else tuple(order)


def _is_off(value: Any, off: Any) -> bool:
    return not value if off is None else value is None or value == off or (off == -1 and value == 0)


def claimed_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    if type(sampling) is not Claimed:
        return standardise(logits, sampling)  # which refuses other subclasses
    if sampling.temperature == 0:
        return standardise(logits, Sampling(0))
    for name in sampling.order:
        if is_active(sampling, name):
            logits = standardise(logits, _only(sampling, name)).log()
    return standardise(logits)


FIELD_OF: dict[str, tuple[str, Any]] = {
    name: (field.name, field.default) for name, field in zip(FILTERS, fields(Sampling), strict=True)
}


def is_active(sampling: Sampling, name: str) -> bool:
    field, off = FIELD_OF[name]
    return bool(getattr(sampling, field) != off)


def _only(sampling: Sampling, name: str) -> Sampling:
    field, _ = FIELD_OF[name]
    return Sampling(**{field: getattr(sampling, field)})


def without_each(sampling: Sampling) -> dict[str, Sampling]:
    """The same settings without one of the filters or penalties claimed, by its name."""
    fewer = {
        name: replace(sampling, **{field: off}) for name, (field, off) in FIELD_OF.items() if is_active(sampling, name)
    }
    if not isinstance(sampling, Claimed):
        return fewer
    for name in PENALTIES:
        off = {name: getattr(NO_PENALTIES, name)}
        if getattr(sampling.penalties, name) != off[name]:
            fewer[name.replace("_", "-")] = replace(sampling, penalties=replace(sampling.penalties, **off))
    return fewer


def twice_each(sampling: Sampling) -> dict[str, Sampling]:
    """The same settings with one of the penalties claimed applied twice, by its name; without those that
    would be out of range."""
    if not isinstance(sampling, Claimed):
        return {}
    each = {name.replace("_", "-"): twice(sampling.penalties, name) for name in PENALTIES}
    return {
        name: replace(sampling, penalties=more)
        for name, more in each.items()
        if more is not None and more != sampling.penalties
    }


def other_orders(sampling: Sampling) -> dict[str, Claimed]:
    """The same settings in other engines' orders; empty where it makes no difference."""
    active = [name for name in FILTERS if is_active(sampling, name)]
    if sampling.temperature == 0 or len(active) < 2:
        return {}
    order = sampling.order if isinstance(sampling, Claimed) else FILTERS
    plain = {name: getattr(sampling, name) for name in FIELDS}
    found: dict[str, Claimed] = {}
    seen = [[name for name in order if name in active]]
    for engine, names in ENGINE_ORDERS.items():
        effective = [name for name in names if name in active]
        if effective not in seen:
            seen.append(effective)
            found[engine] = Claimed(**plain, order=names, penalties=penalties_of(sampling))
    return found


class CutoffGap(NamedTuple):
    """How far a token of probability zero is from being possible.

    logit  difference to the smallest logit that argmax, top-k or min-p keeps; 0 if they keep the
    token
    mass   probability of likelier tokens in excess of top-p, 0 if that keeps the token, where
    earlier filters kept it in place of the weakest that they keep
    """

    logit: float
    mass: float


def cutoff_gap(logits: Tensor, sampling: Sampling, token: int) -> CutoffGap:
    """How far `token` is from those kept, by penalised and constrained `logits` `(vocab,)`; zeros if
    it is kept. One that is too improbable for a float is as far as its logit is from the largest."""
    now = logits.double()
    if sampling.temperature == 0:
        return CutoffGap(float((now.max() - now[token]).clamp_min(0)), 0.0)
    # A token that a constraint forbids is as far from being possible as can be.
    temperature, gap, excess = 1.0, math.inf if now[token] == -math.inf else 0.0, 0.0
    for name in sampling.order if isinstance(sampling, Claimed) else FILTERS:
        if not is_active(sampling, name):
            continue
        own = float(logits[token]) / temperature
        if name == "temperature":
            temperature = sampling.temperature
            now = now / temperature
        elif name == "top-p":
            probs = standardise(now)
            excess = float(probs[probs > probs[token]].sum()) - sampling.top_p
            now = _with(now.where(standardise(now, _only(sampling, name)) > 0, -torch.inf), token, own)
        else:
            weakest = _weakest(now, sampling, name)
            gap = max(gap, temperature * (weakest - own))
            kept = now > weakest if name == "top-k" and own < weakest else now >= weakest
            now = _with(now.where(kept, -torch.inf), token, own)
    unfiltered = standardise(logits, Sampling(sampling.temperature))
    if unfiltered[token] == 0:  # in floats
        gap = max(gap, float(logits.max() - logits[token]))
    return CutoffGap(gap, max(0.0, excess))


def _with(logits: Tensor, token: int, own: float) -> Tensor:
    """`logits` with `token`, which the engine kept, for the filters that follow."""
    return logits.index_fill(0, torch.tensor(token, device=logits.device), own)


def _weakest(logits: Tensor, sampling: Sampling, name: str) -> float:
    if name == "top-k":
        assert sampling.top_k is not None
        return float(logits.topk(min(sampling.top_k, len(logits))).values[-1])
    return float(logits.max()) + math.log(sampling.min_p)
