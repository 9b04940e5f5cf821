"""A model as a sampler runs it: a tree of modules of its own, with the same weights.

The user's model is never changed. `PrivateModel` copies its modules and configuration, and shares
its parameters, buffers and hooks. Three things can make the copy faster than the model:

- Grouped-query attention without a copy of keys and values for each head.
- On a CPU, linear layers that use the product that is fastest there. With the usual product a
  forward pass over five tokens can take three times as long as over one, which leaves nothing to
  gain from speculation. Which is faster differs between processors, dtypes, shapes and numbers of
  rows, by factors in all directions, so four are timed with the model's own weights: the usual one,
  with the weight as saved, `(out, in)`; the same with a transposed copy; the weight times the
  transposed states (swapped); and oneDNN's, with a packed copy.
- One decoder layer compiled as a function of its weights, cache and input, and used for all layers
  of its kind. No weight becomes a constant, so none can be stale.

`Captured` records a function as a CUDA graph.
"""

from __future__ import annotations

import copy
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import psutil
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specnb.cache import SEEN_MULTIPLE, RaggedCache, decoder_config, written_and_seen

Array = NDArray[np.float64]
Product = Callable[[Tensor], Tensor]
Module = TypeVar("Module", bound=nn.Module)
Compile = bool | Literal["auto", "graph"]

GROUPED = "sdpa_grouped"
LEAST_COMPILED = 50_000_000
"""Weights of the smallest model that `compile="auto"` compiles: a smaller one does not earn back the
seconds of compiling."""
MOST_KINDS = 4  # kinds of layers that are compiled, each by itself
CALLS_BEFORE_CAPTURE = 3  # they set up libraries and compile, which a graph cannot contain

TRANSPOSED, PACKED = 1, 3  # the second and the last of the four products
TIMED = 8  # layers of a shape that are timed, of which the others take the same product
ROWS = (1, 2, 5, 16)  # of the states that are timed; a choice holds from that number of rows on
MARGIN = 0.95  # another product is used if it takes less than this fraction of the usual one's time
# Rounds of timing: after the least number none begins later than SECONDS, and after the first none
# later than BUSY, as where other programs use the processor.
LEAST, ROUNDS, SECONDS, BUSY = 3, 9, 0.3, 2.0
SMALLEST = 2**14  # elements of a weight; smaller ones take hardly longer than the call
LAYOUT_ROWS = 8  # rows for which oneDNN chooses its layout; it is good for 1 to hundreds of rows
packed_linear = torch.ops.mkldnn._linear_pointwise.default


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Attention `(batch, n, heads, head_dim)` of `query` `(batch, heads, n, head_dim)`, as models
    call it.

    What has no shared keys, asks for more than a mask for all heads, or is not on the CPU is left
    to transformers.
    """
    (batch, heads, n, _), shared = query.shape, key.shape[1]
    plain = not more.get("dropout") and all(more.get(name) is None for name in ("position_bias", "softcap", "cache"))
    shares = shared < heads and key.device.type == "cpu"
    if not shares or not plain or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    side_by_side = query.reshape(batch, shared, heads // shared * n, -1)
    # One row serves all heads.
    mask = attention_mask if n == 1 else attention_mask.repeat(1, 1, heads // shared, 1)
    mixed = scaled_dot_product_attention(side_by_side, key, value, attn_mask=mask, scale=more.get("scaling"))
    return mixed.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class Weight(NamedTuple):
    """What identifies a parameter or buffer: the object, where its values are, and their layout."""

    owner: int
    place: int
    shape: torch.Size
    dtype: torch.dtype


class PrivateModel:
    """A copy of the modules and configuration of `model` that shares its parameters, buffers and
    hooks.

    Parameters
    ----------
    model
        A model of transformers. It is not changed, neither now nor later.
    compile
        False leaves the modules as they are. "auto" uses what is faster: on a CPU compiled layers
        for a model in 16 bits with at least `LEAST_COMPILED` weights, and else other products of
        linear layers, in float32 and bfloat16. True compiles layers whatever their size. On a GPU
        "auto" and "graph" leave the modules as they are, and the sampler captures its step.

    Attributes
    ----------
    modules
        The copy, a model of transformers like the original.
    compiled
        The layers that are compiled, or None.

    Notes
    -----
    Whatever is no parameter or buffer is as it was when the copy was made: attributes, hooks that
    are registered later, replaced methods of a part. Weights that are changed in place are seen at
    once where nothing was copied; packed copies are compared with them, byte by byte, by
    `require_unchanged`.

    Examples
    --------
    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> private = PrivateModel(model)
    >>> next(private.modules.parameters()) is next(model.parameters()), private.modules.config is model.config
    (True, False)
    """

    def __init__(self, model: PreTrainedModel, compile: Compile = False) -> None:
        self.model = model
        self.modules = shared_copy(model)
        self.weights = weights_of(model)
        self.packed: list[PackedLinear] = []
        self.compiled: CompiledLayers | None = None
        config = decoder_config(self.modules)
        # Somebody may have registered another "sdpa", and its results are the model's own then.
        usual = AttentionInterface().get("sdpa") is sdpa_attention_forward
        if config._attn_implementation == "sdpa" and usual and model.device.type == "cpu":
            config._attn_implementation = GROUPED
        if compile is True or (compile == "auto" and _gains_from_compiling(model)):
            self.compiled = CompiledLayers.of(self.modules)
            if self.compiled is None and compile is True:
                raise TypeError(f"compile=True finds no layers of one kind in {type(model).__name__}; leave it out")
        if compile == "auto" and self.compiled is None:
            self.packed = pack(self.modules)
        self.checksum = _checksum(self.packed)

    def require_unchanged(self) -> None:
        """Raise `RuntimeError` if the model has other weights than when this copy was made, or
        other values in weights of which there are packed copies."""
        if weights_of(self.model) != self.weights or _checksum(self.packed) != self.checksum:
            raise RuntimeError(
                f"the weights of {type(self.model).__name__} were changed after this sampler was made: make another one"
            )


def shared_copy(model: Module) -> Module:
    """The modules and configuration of `model`, copied, with the same parameters, buffers and
    hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            memo[id(tensor)] = tensor
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            memo[id(hook)] = hook
    return copy.deepcopy(model, memo)


def without_hooks(layer: nn.Module) -> nn.Module:
    """A shared copy of `layer` without its own hooks; those of its parts stay."""
    made = shared_copy(layer)
    for hooks in (made._forward_hooks, made._forward_pre_hooks):
        hooks.clear()
    return made


def weights_of(model: nn.Module) -> dict[str, Weight]:
    """What identifies each parameter and buffer of `model`, by name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: Weight(id(each), each.data_ptr(), each.shape, each.dtype) for name, each in named}


def _checksum(packed: Sequence[PackedLinear]) -> int:
    """Of all bytes of the weights and biases of which there are copies."""
    seen = xxhash.xxh3_64()
    for layer in packed:
        for tensor in (layer.weight, layer.bias):
            if tensor is not None:
                seen.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return seen.intdigest()


def _gains_from_compiling(model: PreTrainedModel) -> bool:
    in_16_bits = torch.finfo(model.dtype).bits == 16
    return model.device.type == "cpu" and in_16_bits and model.num_parameters() >= LEAST_COMPILED and has_compiler()


class PackedLinear(nn.Linear):
    """`layer` with the same parameters, and `products` for 1, 2, ... rows; the last holds for more.

    Products round differently, so in float32 the last bits of a result depend on the number of
    rows, as they do in `torch.nn.Linear`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.training = layer.in_features, layer.out_features, layer.training
        self.weight, self.bias = layer.weight, layer.bias
        self.products: list[Product] = []

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        return self.products[rows - 1 if rows < len(self.products) else -1](input)

    def use(self, chosen: list[int]) -> None:
        """From now on uses the products `chosen` for 1, 2, ... rows, with copies of the weight as
        it is."""
        made = {at: self.product(at) for at in set(chosen)}
        self.products = [made[at] for at in chosen]

    def product(self, at: int) -> Product:
        """One of the four products, with the copy that it needs."""
        weight, bias = self.weight.detach(), self.bias
        copy = weight.t().contiguous() if at == TRANSPOSED else weight
        copy = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS) if at == PACKED else copy

        def plus_bias(found: Tensor) -> Tensor:
            return found if bias is None else found + bias

        def swapped(states: Tensor) -> Tensor:
            found = linear(weight, states.reshape(-1, states.shape[-1])).t().contiguous()
            return plus_bias(found.view(*states.shape[:-1], len(weight)))

        products: list[Product] = [
            lambda states: linear(states, weight, bias),
            lambda states: plus_bias(torch.matmul(states, copy)),
            swapped,
            lambda states: packed_linear(states, copy, bias, "none", [], ""),
        ]
        return products[at]


@torch.no_grad()
def pack(model: nn.Module) -> list[PackedLinear]:
    """Give the linear layers of `model` another product where that is faster on this CPU; return
    these layers.

    Passes over eight layers of each shape are timed for 0.3 seconds, or three times if that takes
    longer. A layer keeps up to two copies of its weight. Nothing changes on other devices, in other
    dtypes than float32 and bfloat16, without oneDNN, and where memory is short.

    >>> pack(nn.Sequential(nn.Linear(8, 8)))
    []
    """
    found = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and _can_be_packed(layer)}
    if not 0 < 2 * sum(layer.weight.nbytes for layer in found.values()) < psutil.virtual_memory().available:
        return []
    made = {name: PackedLinear(layer) for name, layer in found.items()}
    timed = _sample(list(made.values()))
    try:
        products = [[layer.product(at) for at in range(PACKED + 1)] for layer in timed]
        seconds = least_seconds([layer.weight for layer in timed], products)
    except RuntimeError:  # oneDNN has no packed layout for this dtype on this processor
        return []
    del products
    shapes = [layer.weight.shape for layer in timed]
    for name, layer in made.items():
        layer.use(fastest(seconds[[shape == layer.weight.shape for shape in shapes]].sum(axis=0)))
        model.set_submodule(name, layer)
    return list(made.values())


def _sample(layers: list[PackedLinear]) -> list[PackedLinear]:
    """Up to `TIMED` layers of each shape, spread over all of its layers, in their order."""
    chosen = []
    for shape in {layer.weight.shape for layer in layers}:
        same = [at for at, layer in enumerate(layers) if layer.weight.shape == shape]
        chosen += same[:: -(-len(same) // TIMED)]
    return [layers[at] for at in sorted(chosen)]


def _can_be_packed(layer: nn.Linear) -> bool:
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):  # which a copy would leave out
        return False
    weight = layer.weight
    usual = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return usual and weight.numel() >= SMALLEST and torch.backends.mkldnn.is_available()


def least_seconds(weights: Sequence[Tensor], products: Sequence[Sequence[Product]]) -> Array:
    """The least seconds `(weights, products, ROWS)`, of several passes over all weights, as a model
    makes them."""
    # Without other programs' time.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = np.full((len(weights), PACKED + 1, len(ROWS)), np.inf)
    start = clock()
    for number in range(ROUNDS):
        if number and clock() > start + (SECONDS if number >= LEAST else BUSY):
            break
        for at in range(PACKED + 1):
            # Most rows first, while these copies are not in the caches.
            for column in reversed(range(len(ROWS))):
                for weight, own, best in zip(weights, products, least[:, at], strict=True):
                    states = weight.new_ones(1, ROWS[column], weight.shape[1])
                    began = clock()
                    own[at](states)
                    best[column] = min(best[column], clock() - began)
    return least


def fastest(seconds: Array) -> list[int]:
    """For 1, 2, ... rows, the product with the least `seconds` `(products, ROWS)`; all but the
    usual need `MARGIN`.

    >>> seconds = [[1.0, 1.0, 3.0, 9.0], [0.8, 2.0, 2.0, 8.0], [0.9, 0.9, 2.0, 7.0], [0.9, 3.0, 1.0, 6.0]]
    >>> fastest(np.array(seconds))[:5]
    [1, 2, 2, 2, 3]
    """
    best = np.concatenate([MARGIN * seconds[:1], seconds[1:]]).argmin(axis=0)
    return [int(best[np.searchsorted(ROWS, rows, side="right") - 1]) for rows in range(1, ROWS[-1] + 1)]


class OneLayer:
    """The cache of one decoder layer inside a compiled function, whose inputs its tensors are."""

    rows, finite = None, False

    def __init__(self, keys: Tensor, values: Tensor, index: tuple[Tensor, Tensor], seen: int) -> None:
        self.keys, self.values, self.index, self.seen = keys, values, index, seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return written_and_seen(self.keys, self.values, key_states, value_states, self)

    def get_seq_length(self, *args: Any) -> int:
        return 0  # as of a `RaggedLayer`


class CompiledLayers:
    """The decoder layers of a model, compiled once for each kind of layer and shape of a pass.

    `widths` are the numbers of tokens of the passes that run compiled. Others, such as those over
    prompts, run eagerly on the same cache. A layer is of another kind than its neighbour if its
    parts, attributes or hooks differ, or if its results with the neighbour's modules and its own
    weights are not the same to the last bit.
    """

    def __init__(self, layers: Sequence[nn.Module], kinds: list[int]) -> None:
        self.kinds = kinds
        self.eager = [layer.forward for layer in layers]
        self.modules = [without_hooks(layer) for layer in layers]  # those of a layer are called outside of it
        self.widths: frozenset[int] = frozenset()
        self.compared: set[int] = set()
        self.ready: dict[tuple[Any, ...], Callable[..., Any]] = {}
        for number, layer in enumerate(layers):
            layer.forward = partial(self.forward, number)

    @classmethod
    def of(cls, model: PreTrainedModel) -> CompiledLayers | None:
        """The decoder layers of `model`, whose modules are the caller's own; None if there are none,
        or of many kinds."""
        wanted = decoder_config(model).num_hidden_layers
        for layers in model.modules():
            if isinstance(layers, nn.ModuleList) and len(layers) == wanted:
                found = [_kind(layer) for layer in layers]
                kinds = [found.index(kind) for kind in found]
                return cls(list(layers), kinds) if len(set(kinds)) <= MOST_KINDS else None
        return None

    def forward(self, number: int, hidden: Tensor, *args: Any, **named: Any) -> Any:
        """What layer `number` computes, as its modules do, or compiled."""
        given: dict[str | int, Any] = {}
        given.update(enumerate(args))
        given.update(named)
        caches = [name for name, value in given.items() if isinstance(value, RaggedCache)]
        if len(caches) != 1 or hidden.shape[1] not in self.widths:
            return self.eager[number](hidden, *args, **named)
        cache = given.pop(caches[0])
        layer = cache.ragged[number]
        masks = [
            name for name, value in given.items()
            if isinstance(value, Tensor) and value.dim() == 4 and value.shape[-1] == cache.seen
        ]  # fmt: skip
        # The first pass of all makes the tensors of the cache.
        if len(masks) != 1 or cache.fills or cache.finite or not layer.is_initialized:
            return self.eager[number](hidden, *args, **named)
        tensors = (layer.keys, layer.values, *cache.index, hidden)
        if number not in self.compared:
            self.compared.add(number)
            if not self._as_its_kind(number, tensors, given, caches[0], masks[0]):
                self.kinds[number] = number
        kind = self.kinds[number]
        key = (kind, hidden.shape, cache.capacity)
        if key not in self.ready:
            if hidden.device.type == "cpu" and cache.capacity > SEEN_MULTIPLE:  # else a pass reads all slots
                torch._dynamo.mark_dynamic(given[masks[0]], 3)
            self.ready[key] = compiled(partial(_run_layer, caches[0], masks[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings inside the compiler
            return self.ready[key](self.modules[number], *tensors, given)

    def _as_its_kind(self, number: int, tensors: tuple[Any, ...], given: dict[Any, Any], cache: Any, mask: Any) -> bool:
        """Whether the modules of the layer's kind compute the same with the weights of this layer."""
        own, kind = self.modules[number], self.modules[self.kinds[number]]
        if own is kind:
            return True
        weights = dict(own.named_parameters()) | dict(own.named_buffers())

        def with_weights(hidden: Tensor, *args: Any, **named: Any) -> Any:
            return torch.func.functional_call(kind, weights, (hidden, *args), named)

        keys, values, written, slots, hidden = tensors
        modules: list[Callable[..., Any]] = [own, with_weights]
        outputs = [
            as_tuple(_run_layer(cache, mask, one, keys, values, written, slots, hidden, given)) for one in modules
        ]
        return all(one is other is None or torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def _run_layer(
    cache: str | int, mask: str | int, module: Callable[..., Any], keys: Tensor, values: Tensor, written: Tensor,
    slots: Tensor, hidden: Tensor, given: dict[str | int, Any],
) -> Any:  # fmt: skip
    """The output of a layer, whose arguments are `given`, but for its cache; the sizes of its mask
    say how many slots it reads."""
    own = given | {cache: OneLayer(keys, values, (written, slots), given[mask].shape[-1])}
    args = [own[name] for name in range(len(own)) if name in own]
    named = {name: value for name, value in own.items() if isinstance(name, str)}
    return module(hidden, *args, **named)


def as_tuple(output: Any) -> tuple[Any, ...]:
    """The output of a layer, which is a tensor or a tuple, as a tuple.

    >>> as_tuple((1, None)), as_tuple(1)
    ((1, None), (1,))
    """
    return output if isinstance(output, tuple) else (output,)


OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def _kind(layer: nn.Module) -> list[Any]:
    """What has to be equal for two layers to be of one kind, but for what they do with their
    number."""
    parts: list[Any] = []
    for name, part in layer.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in OF_EVERY_MODULE and key != "layer_idx"}
        shapes = [(key, value.shape, value.dtype) for key, value in part.named_parameters(recurse=False)]
        hooks = [id(hook) for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        parts.append((name, type(part), shapes, hooks, [(key, _plain(value)) for key, value in own.items()]))
    return parts


def _plain(value: Any) -> Any:
    """A value that is compared by what it is; any other object by its identity."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | type(None)) else id(value)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors, compiled at its first call for the shapes that it then has.

    Sizes that were marked as dynamic may differ later. Nothing else is checked at later calls.
    Raises `RuntimeError` where there is no C++ compiler.
    """
    require_compiler()

    def own(*given: Any) -> Any:
        return function(*given)

    own.__code__ = own.__code__.replace()  # torch keeps what it compiled with this object
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def has_compiler() -> bool:
    """Whether functions can be compiled for the CPU here."""
    try:
        require_compiler()
    except RuntimeError:
        return False
    return True


def require_compiler() -> None:
    """Raises `RuntimeError`, with the remedy, where there is no C++ compiler, or a space in a path
    that it gets."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        get_cpp_compiler()
    except Exception as error:
        raise RuntimeError("compile=True needs a C++ compiler: install g++, or leave compile=False") from error
    for path in (cache_dir(), torch.__file__, sysconfig.get_path("include")):
        if " " in path:  # torch cuts its command there
            remedy = "move the environment, or set TORCHINDUCTOR_CACHE_DIR if it is that, or leave compile=False"
            raise RuntimeError(f"compile=True fails because of the space in {path}: {remedy}")


class Captured:
    """A function of CUDA tensors that is captured as a graph at its first call and replayed at
    every later one.

    The first call executes the function several times, so what it changes in place must allow that.
    Later calls copy their arguments into the first call's inputs, and return the tensors that the
    first call returned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        if self.graph is None:
            self._capture(tensors)
        assert self.graph is not None
        for captured, given in zip(self.inputs, tensors, strict=True):
            captured.copy_(given)
        self.graph.replay()
        return self.outputs

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self.inputs = [tensor.clone() for tensor in tensors]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(CALLS_BEFORE_CAPTURE):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.function(*self.inputs)
