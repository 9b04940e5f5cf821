"""Bad input of drafters: errors that name what was given and what to do, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import attending
from tiny import llama
from torch import Tensor

from specnb.decoding.generate import generate
from specnb.drafting.base import ChainDrafter, Context
from specnb.drafting.length import BanditDrafter, LowConfidence, StoppingDrafter
from specnb.drafting.model import MixtureDrafter, ModelDrafter, TreeDrafter
from specnb.drafting.ngram import (
    NgramDrafter,
    NgramModel,
    PromptLookupDrafter,
    SuffixAutomaton,
    SuffixDrafter,
    UniformDrafter,
    match_lengths,
)
from studies.drafters.early_exit import early_exit
from studies.drafters.fallback import FallbackDrafter
from studies.drafters.hierarchical import HierarchicalDrafter
from studies.drafters.skip_gram import SkipGramDrafter


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramModel(np.array([], dtype=np.int64), 2, 4), "0 tokens are too few"),
        (lambda: NgramModel(np.array([0, 1]), 2, 4, discount=2.0), "discount is 2.0"),
        (lambda: SuffixDrafter([], 4), "no tokens"),
        (lambda: SuffixDrafter([[]], 4), "no tokens"),
        (lambda: SuffixDrafter([[1, 7]], 4), "token 7; the vocabulary has the tokens 0 to 3"),
        (lambda: PromptLookupDrafter(4, longest=1, shortest=2), "shortest is 2 and longest 1"),
        (lambda: PromptLookupDrafter(4, choose="best"), "choose is 'best'"),
        (lambda: UniformDrafter(0), "vocab is 0"),
        (lambda: MixtureDrafter(UniformDrafter(4), UniformDrafter(5)), "4 tokens and UniformDrafter 5"),
        (lambda: MixtureDrafter(UniformDrafter(4), UniformDrafter(4), 1.5), "weight is 1.5"),
        (lambda: StoppingDrafter(UniformDrafter(4), LowConfidence(0.1), at_least=-1), "at_least is -1"),
        (lambda: BanditDrafter(UniformDrafter(4), (), 0.1), r"lengths are \(\)"),
        (lambda: BanditDrafter(UniformDrafter(4), (1, 2), float("nan")), "cost_ratio is nan"),
        (lambda: SuffixDrafter([[], []], 4), "no tokens"),
        (lambda: SkipGramDrafter([0, 1, 2], 0, 4), "gamma is 0"),
        (lambda: NgramModel(np.array([0, 1]), 1, 0), "vocab is 0"),
    ],
)
def test_bad_input_is_refused(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (BanditDrafter, (UniformDrafter(4), (1.5, 2), 0.1), r"lengths\[0\] is 1.5"),
        (NgramModel, (np.array([0, 1]), 1, 4, None), "discount is None"),
        (PromptLookupDrafter, (4, 2.5), "longest is 2.5"),
        (HierarchicalDrafter, (ModelDrafter(llama()), UniformDrafter(4), 2.5), "inner_gamma is 2.5"),
        (SuffixDrafter, (["12"], 4), "document 0 is a str"),
        (SuffixDrafter, ("12", 4), "documents is a str"),
        (SuffixDrafter, ([1, 2], 4), "document 0 is a int"),
        (SuffixDrafter, (count(), 4), "documents is a count"),
        (SuffixDrafter, ([[1.0, 2.5]], 4), "document 0 is an array of shape .* float64"),
        (NgramModel, (np.array([0.5, 1.0, 2.0]), 2, 4), "tokens is an array of shape .* float64"),
        (NgramModel, ("0123", 2, 4), "tokens is a str"),
        (NgramDrafter, ([0, 1, 2],), "model is a list"),
        (SkipGramDrafter, (count(), 2, 4), "tokens is a count"),
        (MixtureDrafter, (llama(), UniformDrafter(4)), r"first is a LlamaForCausalLM; .* give ModelDrafter"),
        (MixtureDrafter, (UniformDrafter(4), SkipGramDrafter([0, 1, 2], 1, 4)), "second is a SkipGramDrafter"),
        (StoppingDrafter, (UniformDrafter, LowConfidence(0.1)), "drafter is the class UniformDrafter"),
        (StoppingDrafter, (UniformDrafter(4), 0.1), "stop is 0.1"),
        (FallbackDrafter, (PromptLookupDrafter(4), llama()), r"model is a LlamaForCausalLM; .* ModelDrafter"),
        (FallbackDrafter, (ModelDrafter(llama()), ModelDrafter(llama())), "copy is a ModelDrafter with a model"),
        (HierarchicalDrafter, (llama(), UniformDrafter(4)), r"large is a LlamaForCausalLM; .* ModelDrafter"),
        (HierarchicalDrafter, (ModelDrafter(llama()), TreeDrafter(llama(), (-1,))), "small .* proposes a tree"),
        (HierarchicalDrafter, (ModelDrafter(llama()), UniformDrafter(4), 2, "token"), "rule is 'token'"),
        (HierarchicalDrafter, (ModelDrafter(llama()), attending()), "small .* reads the target's hidden states"),
        (MixtureDrafter, (attending(), TreeDrafter(llama(), (-1,))), "second .* proposes a tree"),
        (early_exit, ("llama", 1), "target is a str"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(make: Callable[..., Any], arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(*arguments)


def test_a_drafter_of_another_vocabulary_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="vocabular"):
        generate(llama(), [[0, 1]], UniformDrafter(9), progress=False)


def test_a_prompt_shorter_than_the_match_is_refused_if_asked_and_otherwise_decoded_plainly() -> None:
    strict = PromptLookupDrafter(4, longest=3, shortest=3, require_match_possible=True)
    with pytest.raises(ValueError, match=r"a prompt has 1 tokens, and a match of 3 tokens .* needs 4"):
        generate(llama(), [[0]], strict, max_new_tokens=2, progress=False)
    made = generate(llama(), [[0]], PromptLookupDrafter(4, longest=3, shortest=3), max_new_tokens=2, progress=False)
    assert len(made.tokens[0]) == 2


def test_a_saved_table_is_read_back_and_a_broken_one_refused(tmp_path: Path) -> None:
    counted = np.random.default_rng(0).integers(0, 4, 50)
    model, path = NgramModel(counted, 3, 4), tmp_path / "table.npz"
    model.save(path)
    contexts = np.array([[0, 1], [-1, 2], [3, 3]])
    assert np.array_equal(NgramModel.load(path).probs(contexts), model.probs(contexts))
    assert NgramDrafter(NgramModel.load(path)).vocab == 4
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"is no n-gram table .* write it again with NgramModel.save"):
        NgramModel.load(path)
    with pytest.raises(FileNotFoundError):
        NgramModel.load(tmp_path / "missing.npz")


def test_a_saved_table_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    model, path = NgramModel(np.array([0, 1, 0, 1]), 2, 2), tmp_path / "table.npz"
    model.orders[1].tokens[0] = 9
    model.save(path)
    with pytest.raises(ValueError, match="contradicts itself"):
        NgramModel.load(path)


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        ("order", lambda _: 0),
        ("vocab", lambda _: 4.5),
        ("discount", lambda _: np.nan),
        ("1_contexts", lambda own: own[::-1]),
        ("1_contexts", lambda own: own + 4),
        ("1_contexts", lambda own: own.astype(str)),
        ("0_tokens", lambda own: own[::-1]),
        ("1_tokens", lambda own: own + 0.5),
        ("1_tokens", lambda own: own * 0),
        ("1_starts", lambda own: own.astype(bool)),
        ("1_counts", lambda own: own[0]),
    ],
)
def test_a_saved_table_with_a_changed_entry_is_refused(tmp_path: Path, entry: str, change: Callable[..., Any]) -> None:
    path = tmp_path / "table.npz"
    NgramModel(np.array([0, 1, 0, 2, 0, 1, 3, 2]), 2, 4).save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **arrays | {entry: change(arrays[entry])})
    with pytest.raises(ValueError, match="write it again with NgramModel"):
        NgramModel.load(path)


def test_the_automaton_counts_as_a_search_does() -> None:
    documents = [np.random.default_rng(seed).integers(0, 3, 30).tolist() for seed in range(3)]
    automaton = SuffixAutomaton(documents)
    for seed in range(20):
        recent = np.random.default_rng([seed, 1]).integers(0, 3, 6).tolist()
        for length in range(6, -1, -1):
            suffix = recent[6 - length :]
            after = [
                document[at + length]
                for document in documents
                for at in range(len(document) - length)
                if document[at : at + length] == suffix
            ]
            if after:
                break
        assert automaton.continuations(recent) == (length, {token: after.count(token) for token in set(after)})


def test_match_lengths_are_those_of_a_search() -> None:
    for seed in range(20):
        sequence = np.random.default_rng(seed).integers(0, 2, 12).tolist()
        matched = match_lengths(torch.tensor([[*sequence, 1, 1]]), torch.tensor([12]), longest=4)[0].tolist()
        for slot in range(12):
            length = 0
            while length < min(4, slot) and sequence[slot - 1 - length] == sequence[11 - length]:
                length += 1
            assert matched[slot] == length
        assert matched[12:] == [0, 0]


class NotANumber(UniformDrafter):
    """Its second distribution is NaN."""

    def distribution(self, context: Context, position: int) -> Tensor:
        q = super().distribution(context, position)
        return q * float("nan") if position == 1 else q


@pytest.mark.parametrize(
    "inside", [lambda drafter: drafter, lambda drafter: MixtureDrafter(drafter, UniformDrafter(4))]
)
def test_nan_in_the_distribution_of_a_draft_token_is_an_error_and_not_the_end_of_the_draft(
    inside: Callable[[ChainDrafter], ChainDrafter],
) -> None:
    with pytest.raises(FloatingPointError, match="NaN"):
        generate(llama(), [[1, 2]], inside(NotANumber(4)), gamma=3, max_new_tokens=8, progress=False)


def test_a_drafter_s_sampling_is_checked_when_the_drafter_is_made() -> None:
    with pytest.raises(TypeError, match=r"sampling is None; it must be a specnb.distributions.Sampling"):
        ModelDrafter(llama(), None)  # type: ignore[arg-type]
