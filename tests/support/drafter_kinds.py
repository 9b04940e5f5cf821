"""One small drafter of each kind of section 3.6 and 6, for the enumerated check and for the real loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from drafters_for_tests import VOCAB, near_model, table
from tiny import ARCHITECTURES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specnb.drafting.base import ChainDrafter, Context, Drafter, Proposal, TemplateDrafter
from specnb.drafting.heads import (
    AttentionDrafter,
    AttentionHead,
    FeatureDrafter,
    ParallelHeads,
    ParallelHeadsDrafter,
    RecurrentHead,
)
from specnb.drafting.length import BanditDrafter, HighEntropy, LowConfidence, StoppingDrafter, UnlikelySoFar
from specnb.drafting.model import MixtureDrafter, ModelDrafter
from specnb.drafting.ngram import NgramDrafter, NgramModel, PromptLookupDrafter, SuffixDrafter, UniformDrafter
from studies.drafters.early_exit import early_exit
from studies.drafters.fallback import FallbackDrafter
from studies.drafters.hierarchical import HierarchicalDrafter
from studies.drafters.other_vocabulary import OtherVocabularyDrafter
from studies.drafters.skip_gram import SkipGramDrafter

Head = TypeVar("Head", RecurrentHead, AttentionHead, ParallelHeads)
COUNTED = np.random.default_rng(0).integers(0, VOCAB, 60)


class TableDrafter(ChainDrafter):
    """`TemplateDrafter` as a `ChainDrafter`: can be mixed and stopped."""

    vocab = VOCAB

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def distribution(self, context: Context, position: int) -> Tensor:
        return self.table[context.newest]


def chain() -> TableDrafter:
    return TableDrafter(table())


WITHOUT_MODEL: dict[str, Callable[[], Drafter]] = {
    "prompt lookup, recent": lambda: PromptLookupDrafter(VOCAB),
    "prompt lookup, frequent": lambda: PromptLookupDrafter(VOCAB, longest=1, choose="frequent"),
    "prompt lookup, proportional": lambda: PromptLookupDrafter(VOCAB, longest=2, choose="proportional"),
    "suffix": lambda: SuffixDrafter([COUNTED.tolist(), [0, 1, 2]], VOCAB, shortest=1),
    "suffix, proportional": lambda: SuffixDrafter([COUNTED.tolist()], VOCAB, shortest=1, proportional=True),
    "uniform": lambda: UniformDrafter(VOCAB),
    "unigram": lambda: NgramDrafter(NgramModel(COUNTED, 1, VOCAB)),
    "trigram, backing off": lambda: NgramDrafter(NgramModel(COUNTED, 3, VOCAB, discount=0.0)),
    "skip-gram": lambda: SkipGramDrafter(COUNTED, 3, VOCAB),
    "mixture": lambda: MixtureDrafter(PromptLookupDrafter(VOCAB), chain(), weight=0.6),
    "copy, otherwise a table": lambda: MixtureDrafter(PromptLookupDrafter(VOCAB, shortest=2), chain()),
    "low confidence": lambda: StoppingDrafter(chain(), LowConfidence(0.4)),
    "high entropy": lambda: StoppingDrafter(chain(), HighEntropy(0.3, 0.4), at_least=1),
    "unlikely so far": lambda: StoppingDrafter(chain(), UnlikelySoFar(0.2)),
    "bandit": lambda: BanditDrafter(chain(), (1, 2, 3), cost_ratio=0.1),
}
"""Name -> makes a drafter that depends on the sequence alone."""

WITH_MODEL: dict[str, Callable[[], Drafter]] = {
    "copy, otherwise a model": lambda: FallbackDrafter(PromptLookupDrafter(VOCAB, shortest=2), near("llama")),
    "copy and a model": lambda: MixtureDrafter(PromptLookupDrafter(VOCAB), near("llama"), weight=0.4),
    "model until unsure": lambda: StoppingDrafter(near("llama"), LowConfidence(0.4)),
    "early exit": lambda: ModelDrafter(early_exit(near_model("llama"), 1)),
    "other vocabulary": lambda: other_vocabulary(),
    "hierarchical": lambda: HierarchicalDrafter(near("llama"), far("llama"), inner_gamma=2),
    "attention head": lambda: attending(),
    "recurrent head": lambda: FeatureDrafter(near_model("llama"), random_head(RecurrentHead(8, 16))),
    "parallel heads": lambda: ParallelHeadsDrafter(near_model("llama"), random_head(ParallelHeads(8, 16, 2))),
    "hierarchical over a table": lambda: HierarchicalDrafter(near("gpt2"), TemplateDrafter(table()), inner_gamma=1),
}
"""Name -> makes a drafter that has the cache of a model, or reads its features."""

COMBINED: dict[str, Callable[[], Drafter]] = {
    "stopped twice": lambda: StoppingDrafter(StoppingDrafter(near("gpt2"), LowConfidence(0.4)), UnlikelySoFar(0.3)),
    "bandit, stopped": lambda: StoppingDrafter(
        BanditDrafter(near("llama"), (1, 3), 0.1), LowConfidence(0.4), at_least=1
    ),
    "stopped, by a bandit": lambda: BanditDrafter(StoppingDrafter(chain(), LowConfidence(0.4)), (1, 3), 0.1),
    "copy and stopped": lambda: MixtureDrafter(
        PromptLookupDrafter(VOCAB), StoppingDrafter(near("llama"), UnlikelySoFar(0.5)), weight=0.3
    ),
    "copy and bandit": lambda: MixtureDrafter(
        PromptLookupDrafter(VOCAB, shortest=2), BanditDrafter(near("llama"), (1, 2), 0.1), weight=0.6
    ),
    "copy and an attention head": lambda: MixtureDrafter(PromptLookupDrafter(VOCAB), attending(), weight=0.4),
    "attention head until unsure": lambda: StoppingDrafter(attending(), LowConfidence(0.4)),
    "attention head, by a bandit": lambda: BanditDrafter(attending(), (1, 3), 0.1),
    "copy, otherwise another model": lambda: FallbackDrafter(PromptLookupDrafter(VOCAB, longest=1), far("gpt2")),
    "other vocabulary, stopped": lambda: StoppingDrafter(other_vocabulary(), LowConfidence(0.4)),
    "other vocabulary and another model": lambda: MixtureDrafter(other_vocabulary(), near("gpt2"), weight=0.5),
    "hierarchical over a stopped model": lambda: HierarchicalDrafter(
        near("llama"), StoppingDrafter(near("gpt2"), LowConfidence(0.3)), inner_gamma=1
    ),
    "hierarchical over a mixture": lambda: HierarchicalDrafter(
        near("llama"), MixtureDrafter(PromptLookupDrafter(VOCAB), near("llama"), weight=0.3), inner_gamma=2
    ),
    "hierarchical over a fallback": lambda: HierarchicalDrafter(
        near("llama"), FallbackDrafter(PromptLookupDrafter(VOCAB, shortest=2), near("llama")), inner_gamma=1
    ),
    "hierarchical over another": lambda: HierarchicalDrafter(
        near("llama"), HierarchicalDrafter(near("llama"), near("llama"), inner_gamma=1), inner_gamma=1
    ),
}
"""Name -> makes a drafter of drafters."""


def near(architecture: str) -> ModelDrafter:
    """A model that the target often agrees with."""
    model = near_model(architecture)
    model.set_attn_implementation("eager")
    return ModelDrafter(model)


def attending() -> AttentionDrafter:
    """An attention head on the states of two layers."""
    return AttentionDrafter(near_model("llama"), random_head(AttentionHead(8, 16, 2, (0, -1))))


def random_head(head: Head) -> Head:
    """The head with random weights, large enough that its distributions depend on what it reads."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(generator=random)
    return head


def words(vocabulary: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are these letters, written with spaces between them; the last stands for all others."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=vocabulary[-1]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def other_vocabulary() -> OtherVocabularyDrafter:
    """A model that numbers three of the target's four tokens in another order, and lacks the last one."""
    return OtherVocabularyDrafter(near("llama").model, words("cabz"), words("abcd"), VOCAB)


def far(architecture: str) -> ModelDrafter:
    """A model with other weights."""
    model = ARCHITECTURES[architecture](VOCAB, seed=100, layers=1)
    model.set_attn_implementation("eager")
    return ModelDrafter(model)


# Planted bugs: each a drafter that reports another distribution than the one it sampled from, or drops tokens.


class ReportsRaw(Drafter):
    """Samples after temperature 0.5, reports the distribution before it."""

    vocab = VOCAB

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        sharp = table() ** 2 / (table() ** 2).sum(dim=-1, keepdim=True)
        drafted = TemplateDrafter(sharp).propose(context, uniforms).draft_tokens
        before = torch.cat([context.newest[:, None], drafted[:, :-1]], dim=1)
        return Proposal(drafted, table()[before])


class MatchOffByOne(PromptLookupDrafter):
    """Proposes the continuation of the match, and reports the token after that one."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        drafted, q = super().propose(context, uniforms)
        one_later = torch.cat([q[:, 1:], q[:, -1:]], dim=1)
        return Proposal(drafted, one_later.where(q.sum(dim=-1, keepdim=True) > 0, 0.0))


class WeightsIgnored(MixtureDrafter):
    """Samples from the mixture, reports the second drafter's distribution."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        drafted = super().propose(context, uniforms).draft_tokens
        assert isinstance(self.second, TableDrafter)
        return Proposal(drafted, self.second.table[torch.cat([context.newest[:, None], drafted[:, :-1]], dim=1)])


class DiscardsUnlikely(TableDrafter):
    """Takes back a draft token, and all after it, whose own probability is low."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        drafted, q = super().propose(context, uniforms)
        own = q.gather(-1, drafted[..., None])[..., 0]
        kept = (own >= 0.3).cumprod(dim=1).bool()
        return Proposal(drafted.where(kept, -1), q.where(kept[..., None], 0.0))


class GreedySoftQ(TableDrafter):
    """Proposes the most probable token, reports the soft distribution."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        token, tokens, q = context.newest, [], []
        for _ in uniforms.unbind(dim=1):
            q.append(self.table[token])
            token = q[-1].argmax(dim=-1)
            tokens.append(token)
        return Proposal(torch.stack(tokens, dim=1), torch.stack(q, dim=1))


BUGS: dict[str, Callable[[], Drafter]] = {
    "q reported raw": ReportsRaw,
    "match off by one": lambda: MatchOffByOne(VOCAB),
    "mixture weights ignored": lambda: WeightsIgnored(UniformDrafter(VOCAB), chain(), weight=0.7),
    "discarded tokens": lambda: DiscardsUnlikely(table()),
    "greedy tokens, soft q": lambda: GreedySoftQ(table()),
}
"""Name -> makes a drafter with that bug."""
