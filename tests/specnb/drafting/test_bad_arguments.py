"""Bad arguments of drafters: errors that name what was given and what to do, before anything
runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafter_kinds import VOCAB
from tiny import llama
from torch import Tensor
from unsupported_models import convolving

from specnb.drafters import Context, Drafter, MixtureDrafter, ModelDrafter, TreeDrafter
from specnb.ngram import NgramDrafter, NgramModel, PromptLookupDrafter, UniformDrafter
from specnb.sampler import generate

FOUR = UniformDrafter(VOCAB)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (UniformDrafter, (0,), "vocab is 0"),
        (NgramModel, ([], 2, 4), "0 tokens are too few to count 2-grams"),
        (NgramModel, ([0, 1], 2, 4, 2.0), "discount is 2.0"),
        (NgramModel, ([0, 1], 0, 5), "order is 0; with 5 tokens it can be 1 to 27"),
        (NgramModel, ([0, 1], 5, 50_257), "order is 5; with 50257 tokens it can be 1 to 4"),
        (NgramModel, ([0, 5], 1, 5), "tokens must lie in 0 to 4; they reach from 0 to 5"),
        (NgramModel, ([0.5, 1.0], 1, 4), r"tokens is \[0.5, 1.0\]; it must be a list of whole numbers"),
        (NgramModel, ("0123", 2, 4), "tokens is '0123'; .* encode a text"),
        (NgramDrafter, ([0, 1, 2],), "model is a list"),
        (PromptLookupDrafter, (4, 1, 2), "shortest is 2 and longest 1"),
        (PromptLookupDrafter, (4, 2.5), "longest is 2.5"),
        (PromptLookupDrafter, (4, 2, 1, "best"), "choose is 'best'; it must be one of recent, frequent, proportional"),
        (ModelDrafter, (convolving().eval(),), "Lfm2ForCausalLM .* LinearAttentionLayer"),
        (ModelDrafter, (llama(), None), "sampling is None; it must be a specnb.distributions.Sampling"),
        (TreeDrafter, (llama(), (0, -1)), "it must be an earlier node"),
        (MixtureDrafter, (FOUR, UniformDrafter(5)), "4 tokens and UniformDrafter 5"),
        (MixtureDrafter, (FOUR, FOUR, 1.5), "weight is 1.5"),
        (MixtureDrafter, (llama(), FOUR), "first is a LlamaForCausalLM; .* ChainDrafter: give ModelDrafter"),
        (MixtureDrafter, (FOUR, Drafter()), "second is a Drafter"),
        (MixtureDrafter, (FOUR, TreeDrafter(llama(), (-1,))), "second is a TreeDrafter, which proposes a tree"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[..., Any], arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(*arguments)


@pytest.mark.parametrize("inside", [lambda drafter: drafter, lambda drafter: MixtureDrafter(drafter, FOUR)])
def test_nan_in_the_distribution_of_a_draft_token_is_an_error_and_not_the_end_of_the_draft(inside: Any) -> None:
    class NotANumber(UniformDrafter):
        def distribution(self, context: Context, position: int) -> Tensor:
            return super().distribution(context, position) * (float("nan") if position == 1 else 1)

    with pytest.raises(FloatingPointError, match="NaN"):
        generate(llama(), [[1, 2]], inside(NotANumber(VOCAB)), gamma=3, max_new_tokens=8, progress=False)


def test_a_drafter_of_another_vocabulary_is_refused_by_generate() -> None:
    with pytest.raises(ValueError, match="vocabular"):
        generate(llama(), [[0, 1]], UniformDrafter(9), progress=False)
