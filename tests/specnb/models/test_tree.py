"""A model evaluated over a tree: each node has the distribution that its path alone would give."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tiny import ARCHITECTURES, LIMIT, ROUNDING, llama
from torch import Tensor
from transformers import PreTrainedModel
from tree_bugs import TREE_BUGS

from specnb.beam import TreeModel
from specnb.models.cache import additive_mask, ragged_mask
from specnb.models.cached_model import CachedModel

VOCAB = 5
PROMPT = [1, 3, 2]


def model_of(architecture: str, attention: str = "sdpa") -> PreTrainedModel:
    model = ARCHITECTURES[architecture](VOCAB, dtype=torch.float64)
    model.set_attn_implementation(attention)
    return model


def alone(model: PreTrainedModel, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Log-distributions after each path: its whole text in a run of its own, no cache, no mask."""
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[0, -1] for path in paths]
    return torch.log_softmax(torch.stack(rows), dim=-1)


def grown(rng: np.random.Generator, roots: Sequence[tuple[int, ...]], levels: int, width: int) -> list[tuple[int, ...]]:
    """Random paths below `roots`, level by level, parents first."""
    paths, last = [], list(roots)
    for _ in range(levels):
        children = [(*path, token) for path in last for token in range(VOCAB)]
        last = [children[i] for i in sorted(rng.permutation(len(children))[:width])]
        paths += last
    return paths


def largest_error(model: PreTrainedModel, runner: type[TreeModel] = TreeModel, seed: int = 0, rounds: int = 4) -> float:
    """Over several rounds of growing a tree and forgetting most of it, so that freed slots are used again."""
    rng = np.random.default_rng(seed)
    distributions = runner(model, PROMPT, capacity=40)
    roots, errors = [()], []
    for _ in range(rounds):
        paths = [*roots, *grown(rng, roots, 2, 6)]
        errors.append((distributions(paths) - alone(model, paths)).abs().max().item())
        deepest = [path for path in paths if len(path) == len(paths[-1])]
        roots = [deepest[i] for i in rng.permutation(len(deepest))[:3]]
        distributions.keep(roots)
    return max(errors)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_node_has_the_distribution_of_its_path_alone(architecture: str, attention: str) -> None:
    assert largest_error(model_of(architecture, attention)) < ROUNDING[attention]


def test_a_prompt_of_one_token_is_the_root_alone() -> None:
    model = model_of("llama")
    distributions = TreeModel(model, [2], capacity=3)([(), (1,)])
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([[2, 1]]), use_cache=False).logits[0]
    assert torch.allclose(distributions, torch.log_softmax(own, -1), atol=1e-10)


@pytest.mark.parametrize("bug", TREE_BUGS)
def test_planted_bugs_change_the_distributions(bug: str) -> None:
    assert largest_error(model_of("gpt2"), TREE_BUGS[bug].model) > 1e-3


def test_each_node_is_evaluated_once_and_missing_nodes_together() -> None:
    distributions = TreeModel(model_of("llama"), PROMPT, capacity=8)
    distributions([(0, 1), (0, 2), (3,)])
    distributions([(0,), (0, 1), (0, 2, 4)])
    distributions([(3,), ()])
    assert distributions.runs == [5, 1]


def test_dropped_nodes_free_their_slots() -> None:
    distributions = TreeModel(model_of("llama"), PROMPT, capacity=5)
    distributions([(0, 1), (0, 2), (3,)])
    with pytest.raises(RuntimeError, match="2 new nodes need 2 cache slots, but 0 are free: drop nodes"):
        distributions([(4,), (3, 3)])
    distributions.keep([(0, 1)])
    paths = [(0, 1), (0, 1, 2), (0, 1, 3)]
    assert torch.allclose(distributions(paths), alone(model_of("llama"), paths), atol=1e-10)


def test_a_tree_in_half_precision_has_float32_distributions() -> None:
    distributions = TreeModel(llama(VOCAB, dtype=torch.bfloat16), PROMPT, capacity=3)
    assert distributions([(1,), (2,)]).dtype == torch.float32


def test_the_last_position_can_be_reached() -> None:
    model = model_of("gpt2")
    prompt = [1] * (LIMIT - 2)
    distributions = TreeModel(model, prompt, capacity=3)([(0, 1)])
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([[*prompt, 0, 1]]), use_cache=False).logits[0, -1]
    assert torch.allclose(distributions[0], torch.log_softmax(own, -1), atol=1e-10)


def test_a_line_is_a_tree_too() -> None:
    """Explicit positions and visibility of a line give what the runner makes of slots alone, to the last bit."""
    model, tokens, slots = model_of("llama"), torch.tensor([[1, 2, 0, 4]]), torch.arange(4)[None]
    visible = torch.arange(6) <= slots[..., None]
    assert torch.equal(additive_mask(visible, torch.float64), ragged_mask(slots, 6, torch.float64))
    with torch.inference_mode():
        plain = CachedModel(model, 6).run(tokens, slots, keep=4)
        given = CachedModel(model, 6).run(tokens, slots, keep=4, positions=slots, visible=visible)
    assert torch.equal(plain, given)
