"""The enumeration of samplers by asking, on rules whose distribution is known; and files that are
executed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specnb.distributions import sample
from specnb.enumeration import completed, joint_distribution, step_distribution
from specnb.rules import Outcome, Rule, block_verification, lenient_verification, token_verification
from specnb_audit.kernels.enumeration import Enumeration, Found, Steps, random_distributions, won_together
from specnb_audit.kernels.source import load

P, Q = (random_distributions(3, key) for key in range(2))
GAMMA = 2


def carried_out(rule: Rule, steps: Steps) -> Tensor:
    accepted, token, _ = rule(steps.p, steps.q, steps.drafts, steps.uniforms[:, :GAMMA], steps.uniforms[:, GAMMA])
    places = torch.arange(GAMMA + 1)
    tokens = torch.nn.functional.pad(steps.drafts, (0, 1)).where(places < accepted[:, None], -1)
    return tokens.where(places != accepted[:, None], token[:, None])


def found(rule: Rule) -> Found:
    names = ["accept 0", "accept 1", "final"]
    return Enumeration(lambda steps: carried_out(rule, steps), P, Q, GAMMA, names, []).found()


@pytest.mark.parametrize("rule", [token_verification, block_verification, lenient_verification(0.8)])
def test_the_total_variation_is_that_of_the_multiplied_rule(rule: Rule) -> None:
    emitted = completed(step_distribution(rule, P, Q, GAMMA), P, GAMMA + 1)
    known = float((emitted - joint_distribution(P, GAMMA + 1)).abs().sum() / 2)
    one = found(rule)
    assert one.total_variation == pytest.approx(known, abs=one.resolution)
    assert one.verdict == ("exact" if known < 1e-9 else "deviates")
    assert one.resolution < 1e-4
    assert 1 in one.decides["accept 1"]


def test_a_race_is_found_to_have_the_weights_of_its_distribution() -> None:
    """A race for each position gives the recovered token; with the weights of p, or used for the
    draft, it deviates."""

    def raced(steps: Steps, residual: bool) -> Tensor:
        accepted = token_verification(steps.p, steps.q, steps.drafts, steps.uniforms, steps.uniforms[:, 0]).accepted
        q, rows = torch.nn.functional.pad(steps.q, (0, 0, 0, 1)) * residual, torch.arange(len(accepted))
        token = (steps.races[rows, accepted] / (steps.p - q).clamp_min(0)[rows, accepted]).argmin(-1)
        return carried_out(lambda *_: Outcome(accepted, token), steps._replace(uniforms=steps.uniforms[:, [0, 1, 1]]))

    def of(drafted: dict[str, int], residual: bool = True) -> Found:
        names = ["accept 0", "accept 1"], ["noise 0", "noise 1", "noise 2"]
        return Enumeration(lambda steps: raced(steps, residual), P, Q, GAMMA, *names, drafted).found()

    assert of({}).verdict == "exact"
    assert of({}, residual=False).verdict == of({"noise 0": 0, "noise 1": 1}).verdict == "deviates"


def test_one_noise_for_two_races() -> None:
    """Probabilities that sum to the weights of either race, and agree with a hundred thousand
    samples."""
    one, other = torch.tensor([0.1, 0.5, 0.1, 0.3]).double(), torch.tensor([0.4, 0.0, 0.5, 0.1]).double()
    both = won_together(one, other)
    assert torch.allclose(both.sum(1), one)
    assert torch.allclose(both.sum(0), other)
    noise = -torch.rand(100_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log()
    pairs = (noise / one).argmin(1) * 4 + (noise / other).argmin(1)
    assert torch.allclose(torch.bincount(pairs, minlength=16) / len(pairs), both.flatten().float(), atol=0.005)


def test_thresholds_that_form_no_grid_are_not_understood() -> None:
    def summed(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return Outcome(torch.zeros_like(drafts[:, 0]), sample(p[:, 0], (accept.sum(1) + final) % 1))

    assert found(summed).verdict == "not understood"


def test_two_races_at_once_and_ids_outside_the_vocabulary_are_refused() -> None:
    def two(steps: Steps) -> Tensor:
        return torch.nn.functional.pad(steps.races.argmin(-1), (0, 1), value=-1)

    with pytest.raises(ValueError, match="two races decide at once"):
        Enumeration(two, P, Q, GAMMA, [], ["one", "other"]).found()
    with pytest.raises(ValueError, match="emits 3 to 3, with 3 tokens"):
        Enumeration(lambda steps: torch.full((len(steps.p), 3), 3), P, Q, GAMMA, [], []).found()


SOURCE = """
from torch import zeros
import engine.config as config
from engine.tools import Base, log, optional, wanted
if optional():
    import a_package_that_is_not_installed
@log
def twice(x: "int | None", y: config.A | Base | None = None):
    return 2 * wanted * x
class Derived(Base[int]):
    made = log("here", level=1).more
"""


def test_a_file_is_executed_with_stand_ins_for_its_own_package() -> None:
    names, used = load(SOURCE, "engine/file.py", {"wanted": 3, "not imported": 4})
    assert names["twice"](5) == 30
    assert names["zeros"] is torch.zeros
    assert used == ["wanted"]
