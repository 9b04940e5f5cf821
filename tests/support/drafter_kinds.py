"""A small drafter of each kind, alone and combined, and drafters with planted bugs: what every
drafter test runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from tiny import ARCHITECTURES, near_copy
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, sample
from specnb.drafters import ChainDrafter, Context, Drafter, ModelDrafter, Proposal, TreeDrafter
from specnb.heads import AttentionDrafter, Eagle3Head, FallbackDrafter, NextTokenHead, NextTokenLayers
from specnb.trees import independent_children
from studies.drafters.drafters import CountedCopy
from studies.drafters.early_exit import early_exit
from studies.drafters.egag import EntropyGuidedDrafter
from studies.drafters.heads import FeatureDrafter, ParallelHeads, ParallelHeadsDrafter, RecurrentHead
from studies.drafters.hierarchical import HierarchicalDrafter
from studies.drafters.length import Calibration, StopDrafter
from studies.drafters.tables import MixtureDrafter, NgramDrafter, NgramModel, UniformDrafter

Head = TypeVar("Head", bound=nn.Module)
VOCAB, WIDTH = 4, 8  # of the tiny models
DEVICE = "cpu"
"""Where drafters are made."""
COUNTED = np.random.default_rng(0).integers(0, VOCAB, 60)
TWO_DRAFTS = (-1, -1)
DEPTH_2 = (-1, -1, 0, 0, 1)
DEEP = (-1, 0, -1, 1, 2, 1)  # depth 3, nodes of different branches in turn
HALVES = Calibration(torch.tensor([0.4], dtype=torch.float64), torch.tensor([0.3, 0.9], dtype=torch.float64), 0.6)
"""Draft tokens of a probability below 0.4 are accepted with 0.3, the others with 0.9."""


def table(seed: int = 0) -> Tensor:
    """Random next-token probabilities `(VOCAB, VOCAB)` after each token."""
    random = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(random, dim=-1).to(DEVICE)


class TableDrafter(ChainDrafter):
    """Samples from `table` `(vocab, vocab)`, given the token before."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab = table, table.shape[1]

    def distribution(self, context: Context, position: int) -> Tensor:
        return self.table[context.newest]


class TableTreeDrafter(Drafter):
    """A tree, or several independent drafts of one token: each node is sampled given its parent's
    token."""

    vocab = VOCAB

    def __init__(self, parents: tuple[int, ...]) -> None:
        self.parents: tuple[int, ...] = parents
        self.table = table()

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for parent, uniform in zip(self.parents, uniforms.unbind(dim=1), strict=True):
            distributions.append(self.table[context.newest if parent < 0 else tokens[parent]])
            tokens.append(sample(distributions[-1], uniform))
        return Proposal(torch.stack(tokens, dim=1), torch.stack(distributions, dim=1))


def chain() -> TableDrafter:
    return TableDrafter(table())


def near_model(architecture: str) -> PreTrainedModel:
    """A draft model that is accepted often."""
    model = near_copy(ARCHITECTURES[architecture](VOCAB), noise=0.2)
    model.set_attn_implementation("eager")
    return model.to(DEVICE)  # type: ignore[arg-type, no-any-return]  # the stub takes no name


def near(architecture: str) -> ModelDrafter:
    return ModelDrafter(near_model(architecture))


def random_head(head: Head) -> Head:
    """The head with random weights, large enough that its distributions depend on what it reads."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(generator=random)
    return head.to(DEVICE)


def recurrent() -> FeatureDrafter:
    return FeatureDrafter(near_model("llama"), random_head(RecurrentHead(WIDTH, 16)))


def layer_config(**settings: Any) -> LlamaConfig:
    """Of one layer for the tiny models."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1,
                             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    return LlamaConfig(**(sizes | settings))


def eagle3() -> AttentionDrafter:
    """Drafts three of the four tokens, with embeddings of its own."""
    head = Eagle3Head(layer_config(), (0, 1), draft_vocab=3, own_embedding=True, norm_before_residual=True)
    head.choose(torch.tensor([0, 1, 3]))
    return AttentionDrafter(near_model("llama"), random_head(head))


def attending(most: int | None = None) -> AttentionDrafter:
    """An EAGLE-3 head that drafts all tokens, with the target's embeddings."""
    head = Eagle3Head(layer_config(), (0, 1), norm_before_residual=True)
    return AttentionDrafter(near_model("llama"), random_head(head), most=most)


def next_token() -> AttentionDrafter:
    return AttentionDrafter(near_model("llama"), random_head(NextTokenHead(layer_config())))


def next_token_layers(count: int = 2) -> AttentionDrafter:
    """`count` layers as in a checkpoint of DeepSeek, here of a Llama."""
    target = near_model("llama")
    target.config.num_mtp_layers = count
    loaded: Any = MtpModel(target, count)
    for layer in loaded.layers:  # not what is the target's
        random_head(layer)
    return AttentionDrafter(target, NextTokenLayers(loaded.to(DEVICE, target.dtype).eval()))


def parallel(count: int = 2) -> ParallelHeadsDrafter:
    return ParallelHeadsDrafter(near_model("llama"), random_head(ParallelHeads(WIDTH, 16, count)))


def counted() -> NgramDrafter:
    return NgramDrafter(NgramModel(COUNTED, 3, VOCAB))


def lookup(shortest: int = 1) -> PromptLookupDrafter:
    return PromptLookupDrafter(VOCAB, shortest=shortest)


CHAINS: dict[str, Callable[[], Drafter]] = {
    "prompt lookup": lookup,
    "copies in proportion": lambda: CountedCopy(VOCAB, longest=2),
    "uniform": lambda: UniformDrafter(VOCAB),
    "trigram": counted,
    "table": chain,
    "mixture": lambda: MixtureDrafter(lookup(), chain(), weight=0.6),
    "copy, otherwise a table": lambda: MixtureDrafter(lookup(shortest=2), chain()),
    "stopped": lambda: StopDrafter(chain(), HALVES, 0.3),
    "stopped, sampled otherwise": lambda: StopDrafter(chain(), HALVES, 0.3, Sampling(0.7)),
    "entropy-guided": lambda: EntropyGuidedDrafter(chain(), gamma_max=3),
    "entropy-guided, cut at the end": lambda: EntropyGuidedDrafter(
        chain(), Sampling(0.7), gamma_max=3, egag_ema_beta=0.5, max_new_tokens=2
    ),
    "model": lambda: near("llama"),
    "early exit": lambda: ModelDrafter(early_exit(near_model("llama"), 1)),
    "recurrent head": recurrent,
    "EAGLE-3 head": attending,
    "EAGLE-3 head of some tokens": eagle3,
    "next-token head": next_token,
    "two next-token layers": next_token_layers,
    "parallel heads": parallel,
    "copy, otherwise a head": lambda: FallbackDrafter(lookup(shortest=2), attending()),
    "copy, otherwise a token of a head": lambda: FallbackDrafter(lookup(shortest=2), attending(most=1)),
    "model, entropy-guided": lambda: EntropyGuidedDrafter(near("llama"), gamma_max=3, egag_ema_beta=0.5),
    "stopped twice": lambda: StopDrafter(EntropyGuidedDrafter(near("gpt2"), gamma_max=3), HALVES, 0.3),
    "copy and stopped": lambda: MixtureDrafter(lookup(), StopDrafter(near("llama"), HALVES, 0.5), 0.3),
}
"""Name -> makes a drafter whose draft tokens are sampled one after the other with the uniforms
given."""

HIERARCHICAL: dict[str, Callable[[], Drafter]] = {
    "hierarchical over a table": lambda: HierarchicalDrafter(near("gpt2"), chain(), inner_gamma=1),
    "hierarchical over n-grams": lambda: HierarchicalDrafter(near("llama"), counted()),
}
"""Name -> makes a drafter that makes more uniforms of those given, by hashing: no enumeration over
them is possible."""

TREES: dict[str, Callable[[], Drafter]] = {
    "two drafts": lambda: TableTreeDrafter(TWO_DRAFTS),
    "tree of depth 2": lambda: TableTreeDrafter(DEPTH_2),
    "tree of a model": lambda: TreeDrafter(near_model("llama"), DEPTH_2, scheme=independent_children),
    "deep tree of a model": lambda: TreeDrafter(near_model("llama"), DEEP),
}
"""Name -> makes a drafter of trees."""


def gamma_of(drafter: Drafter) -> int:
    """The number of draft tokens that tests ask for: 3, or the nodes of a tree."""
    return len(drafter.parents or (0, 0, 0))


# Planted bugs: each a drafter that reports another distribution than the one it sampled from, or
# drops tokens.


class ReportsRaw(TableDrafter):
    """Samples after temperature 0.5, reports the distribution before it."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        sharp = self.table**2 / (self.table**2).sum(dim=-1, keepdim=True)
        return reported(TableDrafter(sharp).propose(context, uniforms), context, self.table)


class MatchOffByOne(PromptLookupDrafter):
    """Proposes the continuation of the match, and reports the token after that one."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        drafted, q = super().propose(context, uniforms)
        one_later = torch.cat([q[:, 1:], q[:, -1:]], dim=1)
        return Proposal(drafted, one_later.where(q.sum(dim=-1, keepdim=True) > 0, 0.0))


class WeightsIgnored(MixtureDrafter):
    """Samples from the mixture, reports the second drafter's distribution."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        assert isinstance(self.second, TableDrafter)
        return reported(super().propose(context, uniforms), context, self.second.table)


class Discarding(TableDrafter):
    """Takes back its tokens from the first one on whose probability is below 0.3."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens, q = super().propose(context, uniforms)
        likely = q.gather(-1, draft_tokens[..., None])[..., 0] >= 0.3
        kept = likely.cumprod(dim=1).bool()
        return Proposal(draft_tokens.where(kept, -1), q.where(kept[..., None], 0.0))


class GreedySoftQ(TableDrafter):
    """Proposes the most probable token, reports the soft distribution."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        certain = torch.nn.functional.one_hot(self.table.argmax(dim=-1), VOCAB).float()
        return reported(TableDrafter(certain).propose(context, uniforms), context, self.table)


def reported(proposal: Proposal, context: Context, table: Tensor) -> Proposal:
    """The tokens of `proposal` with the distributions of `table`."""
    before = torch.cat([context.newest[:, None], proposal.draft_tokens[:, :-1]], dim=1)
    return Proposal(proposal.draft_tokens, table[before])


BUGS: dict[str, Callable[[], Drafter]] = {
    "q reported raw": lambda: ReportsRaw(table()),
    "match off by one": lambda: MatchOffByOne(VOCAB),
    "mixture weights ignored": lambda: WeightsIgnored(UniformDrafter(VOCAB), chain(), weight=0.7),
    "discarded tokens": lambda: Discarding(table()),
    "greedy tokens, soft q": lambda: GreedySoftQ(table()),
}
"""Name -> makes a drafter with that bug."""
