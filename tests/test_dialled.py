"""A dialled pair has the acceptance that was asked for, and is a pair like any other."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specnb.decode import generate
from specnb.dialled import DRAFT, TARGET, Shape, dialled_pair
from specnb.law import overlap, standardise
from specnb.models import load_pair

LARGE, SMALL = Shape(2, 96, 192, 4), Shape(1, 48, 96, 2)


def small_pair(alpha=0.7, seed=0):
    return dialled_pair(alpha, LARGE, SMALL, vocab=512, context=128, seed=seed)


@torch.inference_mode()
def alpha_of(pair, texts):
    p, q = (standardise(model(input_ids=texts).logits) for model in (pair.target, pair.draft))
    return float(overlap(p, q).mean())


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.76, 0.9])
def test_alpha_is_what_was_asked(alpha):
    pair = small_pair(alpha)
    texts = torch.randint(512, (16, 64), generator=torch.Generator().manual_seed(5))
    assert alpha_of(pair, texts) == pytest.approx(alpha, abs=0.03)


def test_alpha_holds_along_text_that_the_pair_writes():
    pair = small_pair(0.76)
    made = generate(pair.target, [[token] for token in range(32)], gamma=0, max_new_tokens=64, progress=False)
    assert alpha_of(pair, torch.tensor(made.tokens)) == pytest.approx(0.76, abs=0.05)


def test_the_same_seed_gives_the_same_pair():
    weights = [torch.cat([w.flatten() for w in small_pair(seed=s).target.parameters()]) for s in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_pair_is_saved_and_loaded_like_any_other(tmp_path):
    pair = small_pair()
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)
    again = load_pair(tmp_path / "target", tmp_path / "draft")
    tokens = torch.tensor([pair.encode("5 17 511")])
    assert tokens.tolist() == [[0, 5, 17, 511]]
    with torch.inference_mode():
        torch.testing.assert_close(again.target(tokens).logits, pair.target(tokens).logits, rtol=1e-4, atol=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.num_hidden_layers == SMALL.layers


def test_the_default_shapes_are_the_papers():
    assert Shape(layers=12, width=768, feed_forward=3072, heads=12) == TARGET
    assert Shape(layers=2, width=256, feed_forward=1024, heads=4) == DRAFT


@pytest.mark.parametrize("alpha", [-0.1, 0.0, 0.05, 1.0, 2.0, float("nan")])
def test_an_alpha_that_cannot_be_dialled_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha is .*; a dialled pair has one from 0.1 to 0.99"):
        small_pair(alpha)
