"""Which temperature, with which filter, fits tokens best: settings that nobody claimed.

A filter's value is the narrowest that keeps every token; temperatures are tried on a grid. Top-p is
tried before and after the temperature; for top-k and min-p the order does not change which tokens
are kept, so the temperature is written after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import Sampling
from specnb_audit.claimed import Claimed, claimed_probs, penalties_of
from specnb_audit.setting_names import ENGINE_ORDERS, FILTERS
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_logits

TEMPERATURES = np.array([
    0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0,
    1.01, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0,
])  # fmt: skip
LIKELIEST = 2048
"""Tokens of each position that a filter may keep; a wider one is not found."""

BEYOND = 1e-3  # of the probability, without the claimed filter, because rounding lets tokens past it
AFTER = " after the temperature"

Array = NDArray[np.float64]


class Fit(NamedTuple):
    """Settings, in words, and as options of the command; and how many nats better than the claim, with its
    filter or without, they fit."""

    gain: float
    sampling: Claimed
    words: str
    options: str


def fitted_settings(models: Models, completions: Sequence[Completion], delta: float) -> Fit | None:
    """The settings that fit the tokens best, by a likelihood ratio above 1/`delta` for each thing that
    differs from the claim; None if no other do."""
    claimed = models.sampling
    if claimed.temperature == 0 or not any(one.tokens for one in completions):
        return None
    grid = np.unique([*TEMPERATURES, claimed.temperature])
    seen = _Seen(models, completions, grid)
    if not bool(seen.own.isfinite().all()):  # a token that is impossible whatever the settings
        return None
    fits = {name: seen.log_likelihoods(kept) for name, kept in ({"": None} | seen.kept()).items()}
    is_claimed = grid == claimed.temperature
    base = max(float(fits[""][is_claimed][0]), seen.claimed)
    least = math.log(len(grid) * len(fits) / delta)
    # Each thing that differs has to be worth its own ratio.
    differing = {name: int(name != "") + (~is_claimed).astype(int) for name in fits}
    scores = {name: values - base - least * differing[name] for name, values in fits.items()}
    name = max(scores, key=lambda name: scores[name].max())
    at = int(scores[name].argmax())
    if not scores[name][at] > 0:
        return None
    return _fit(float(fits[name][at]) - base, name, float(grid[at]), seen.value(name, at), claimed)


def _fit(gain: float, name: str, temperature: float, value: float, claimed: Sampling) -> Fit:
    filter_name = name.removesuffix(AFTER)
    is_before = filter_name != name or not name or temperature == 1
    order = FILTERS if is_before else ENGINE_ORDERS["llama.cpp"]
    field = filter_name.replace("-", "_")
    settings = {field: int(value) if field == "top_k" else value} if name else {}
    words, options = [f"{filter_name} {value:g}"] * bool(name), [f"--{filter_name} {value:g}"] * bool(name)
    if temperature != claimed.temperature:
        words.append(f"a temperature of {temperature:g} in place of {claimed.temperature:g}")
    options += [f"--temperature {temperature:g}"] + ["--filter-order llama.cpp"] * (order != FILTERS)
    sampling = Claimed(temperature, **settings, order=order, penalties=penalties_of(claimed))  # type: ignore[arg-type]
    return Fit(gain, sampling, (" before " if order != FILTERS else " and ").join(words), " ".join(options))


class _Seen:
    """The logits at n tokens: of the likeliest ones, sorted; of the token, with its rank; and the
    normalisers of all `(temperatures, n)`. `claimed` is the log-likelihood of all tokens under the claim, mixed
    with a little of the same without its filter."""

    def __init__(self, models: Models, completions: Iterable[Completion], grid: Array) -> None:
        own, rank, top, whole = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        self.claimed = 0.0
        for one, start, given, _ in teacher_forced_logits(models._replace(draft=None), completions):
            logits = given.double()
            tokens = torch.as_tensor(one.tokens[start : start + len(logits)], device=logits.device)[:, None]
            mine = logits.gather(-1, tokens)
            plain = torch.softmax(logits / models.sampling.temperature, dim=-1)
            claim = torch.lerp(claimed_probs(logits, models.sampling), plain, BEYOND)
            self.claimed += float(claim.gather(-1, tokens).log().sum())
            own.append(mine[:, 0].cpu())
            rank.append((logits > mine).sum(dim=-1).cpu())
            top.append(logits.topk(min(LIKELIEST, logits.shape[-1]), dim=-1).values.cpu())
            whole.append(torch.stack([(logits / t).logsumexp(dim=-1).cpu() for t in grid.tolist()]))
        self.own, self.rank, self.top = torch.cat(own), torch.cat(rank), torch.cat(top)
        self.grid, self.whole = torch.from_numpy(grid), torch.cat(whole, dim=1)
        self.gap = float((self.top[:, 0] - self.own).max())
        self.reached: list[float] = []  # top-p at each temperature

    def kept(self) -> dict[str, Tensor]:
        """How many of the likeliest tokens each filter keeps, `(n,)` or `(temperatures, n)`, where it
        is as narrow as the tokens allow; empty where that is wider than `LIKELIEST`."""
        if int(self.rank.max()) >= self.top.shape[1]:
            return {}
        at_each = list[Tensor]()
        for t, normaliser in zip(self.grid, self.whole, strict=True):
            mass = (self.top / t - normaliser[:, None]).exp().cumsum(dim=-1)
            before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
            reached = float(before.gather(-1, self.rank[:, None]).max())
            self.reached.append(min(1.0, (math.floor(200 * reached + 1e-6) + 1) / 200))  # above it, in steps of 0.005
            at_each.append((before < self.reached[-1]).sum(dim=-1))
        return {
            "top-k": torch.full_like(self.rank, int(self.rank.max()) + 1),
            "min-p": (self.top >= self.top[:, :1] - self.gap).sum(dim=-1),
            "top-p": at_each[int((self.grid == 1).nonzero())],
            f"top-p{AFTER}": torch.stack(at_each),
        }

    def log_likelihoods(self, kept: Tensor | None) -> Array:
        """Of all tokens at each temperature `(temperatures,)`."""
        normalisers = self.whole
        if kept is not None:
            inside = torch.arange(self.top.shape[1]) < kept.expand(len(self.grid), -1)[..., None]
            each = zip(self.grid, inside, strict=True)
            normalisers = torch.stack([(self.top / t).where(one, -torch.inf).logsumexp(dim=-1) for t, one in each])
        found: Array = (self.own / self.grid[:, None] - normalisers).sum(dim=1).numpy()
        return found

    def value(self, name: str, at: int) -> float:
        """Of the filter, at temperature number `at`; a little wider than the tokens need, for rounding."""
        if name == "min-p":
            return float(f"{0.995 * math.exp(-self.gap):.3g}")
        if name.startswith("top-p"):
            return self.reached[at if name.endswith(AFTER) else int((self.grid == 1).nonzero())]
        return float(self.rank.max()) + 1
