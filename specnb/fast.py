"""A model as a sampler runs it: a private tree of modules that shares the weights of the user's model.

It can be faster than the model: by grouped-query attention without copies of keys and values, by
packed weights (`pack`), and by `CompiledLayers`. `Captured` records a function as a CUDA graph.

Parts that torch may change without notice bound its version in pyproject.toml: here
`torch.ops.mkldnn._reorder_linear_weight` and `_linear_pointwise`, `torch.ops.aten._weight_int4pack_mm_for_cpu`
and its conversion, `torch._dynamo.mark_dynamic`, and a module's `_parameters`, `_buffers` and hooks; in
`support` dropout.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specnb.arguments import shown
from specnb.cache import RaggedCache, decoder_config, written_and_seen

Module = TypeVar("Module", bound=nn.Module)
Compile = bool | Literal["auto"]

GROUPED = "sdpa_grouped"
MOST_KINDS = 4  # kinds of layers that are compiled, each by itself
CALLS_BEFORE_CAPTURE = 3  # they set up libraries and compile, which a graph cannot contain

TIMED = 2**27  # bytes of weights of a shape that are timed: more than caches hold, as in a pass
ROWS = (1, 3, 5, 11)  # of states: without draft tokens, and with those of a head, a model and copies
ROUNDS, SECONDS = 5, 0.5  # of timing; no round begins later
MARGIN = 0.95  # a packed layer is used if it takes less than this fraction of the usual one's time
SMALLEST = 2**14  # elements of a weight; smaller ones take hardly longer than the call
LAYOUT_ROWS = 8  # rows for which oneDNN chooses its layout; it is good for 1 to hundreds of rows
FEW_ROWS = 4  # of states, in which reading the weights takes most of the time; torch multiplies 4 at once with 4 bits
GROUP = 32  # weights of 4 bits that share a step and a middle
AT_ONCE = 256  # rows of a weight that are compared with 4 bits


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Attention in which the heads that share keys are rows of one product, if the mask is plain; the usual one repeats
    keys and values for each head."""
    (batch, heads, n, _), shared = query.shape, key.shape[1]
    plain = not more.get("dropout") and all(more.get(name) is None for name in ("position_bias", "softcap", "cache"))
    if shared == heads or not plain or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    side_by_side = query.reshape(batch, shared, heads // shared * n, -1)
    # One row serves all heads.
    mask = attention_mask if n == 1 else attention_mask.repeat(1, 1, heads // shared, 1)
    mixed = scaled_dot_product_attention(side_by_side, key, value, attn_mask=mask, scale=more.get("scaling"))
    return mixed.reshape(batch, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class PrivateModel:
    """A copy of the modules and configuration of a model, with the model's own parameters, buffers and hooks.

    Parameters
    ----------
    compile
        False leaves the modules as they are, "auto" packs weights on a CPU, and True compiles layers,
        too.
    """

    def __init__(self, model: PreTrainedModel, compile: Compile = False) -> None:
        if not isinstance(compile, bool) and compile != "auto":
            raise ValueError(f'compile is {shown(compile)}; it must be False, True or "auto"')
        self.model = model
        self.modules = shared_copy(model)
        self.packed: list[nn.Linear] = []
        self.compiled: CompiledLayers | None = None
        config = decoder_config(self.modules)
        # If another "sdpa" was registered, the results of that are the model's own.
        usual = AttentionInterface().get("sdpa") is sdpa_attention_forward
        if config._attn_implementation == "sdpa" and usual:
            config._attn_implementation = GROUPED
        if compile in (True, "auto"):
            self.packed = pack(self.modules)
        if compile is True:
            self.compiled = CompiledLayers.of(self.modules)
            if self.compiled is None:
                raise TypeError(f"compile=True finds no layers of one kind in {type(model).__name__}; leave it out")
        self.weights = self._weights()

    def _weights(self) -> tuple[Any, ...]:
        packed = (tensor for layer in self.packed for tensor in (layer.weight, layer.bias))
        return weights_of(self.model), checksum(packed)

    def require_unchanged(self) -> None:
        """Raise `RuntimeError` if weights were replaced, or changed where there are packed copies."""
        if self._weights() != self.weights:
            raise RuntimeError(f"the weights of {type(self.model).__name__} were changed: make another sampler")


def shared_copy(model: Module) -> Module:
    """A copy of `model` with the same parameters, buffers and hooks, and other tensors of its modules."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        others = [value for value in vars(module).values() if isinstance(value, Tensor)]
        for tensor in (*module._parameters.values(), *module._buffers.values(), *others):
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


def has_code_of_its_own(model: nn.Module) -> bool:
    """Whether a part has a hook or a `forward` of the user's, which may read what changes later."""
    for part in model.modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        # transformers adds hooks that record states.
        if "forward" in vars(part) or not all(str(hook.__module__).startswith("transformers.") for hook in hooks):
            return True
    return False


def weights_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What identifies each parameter and buffer: the object, the place of its values, and their layout."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(each), each.data_ptr(), each.shape, each.dtype) for name, each in named}


def checksum(tensors: Iterable[Tensor | None]) -> int:
    seen = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor is not None:
            seen.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return seen.intdigest()


class SharedLinear(nn.Linear):
    """A linear layer with the parameters of another one."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.training = layer.in_features, layer.out_features, layer.training
        self.weight, self.bias = layer.weight, layer.bias


class PackedLinear(SharedLinear):
    """A linear layer with a copy of its weight in oneDNN's layout, whose products round differently."""

    packed: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), LAYOUT_ROWS))

    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.specnb.packed_linear(input, self.packed, self.bias)  # type: ignore[no-any-return]


class FourBitLinear(SharedLinear):
    """A linear layer whose weights come from a file with 4 bits, and are read in 4 bits for few rows.

    Raises `RuntimeError` for other weights, and where torch's product is not that of the layer.
    """

    integers: Tensor
    steps: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.of_many_rows = layer
        integers, steps = four_bits(layer.weight.detach())
        packed = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.int(), 1) for rows in integers.split(AT_ONCE)]
        self.register_buffer("integers", torch.cat(packed))
        self.register_buffer("steps", steps)
        states = torch.randn(FEW_ROWS, self.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
        usual = nn.functional.linear(states, layer.weight, layer.bias).float()
        if not (self(states) - usual).norm() <= torch.finfo(torch.bfloat16).eps * usual.norm():
            raise RuntimeError("the product with 4 bits differs")

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() > FEW_ROWS * self.in_features:
            return self.of_many_rows(input)  # type: ignore[no-any-return]
        rows = input.reshape(-1, self.in_features).contiguous()
        made = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.integers, GROUP, self.steps)
        made = made.reshape(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias  # type: ignore[no-any-return]


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers 0 to 15 `(out, in)`; of each group the step between them and the weight of 8, `(in / 32, out, 2)`.

    Raises `RuntimeError` unless they give `weight` up to rounding: that of the weight, the step and the weight of 8 to
    bfloat16, each relative to the group's largest weight.

    >>> integers, steps = four_bits(torch.arange(32).remainder(16).reshape(1, 32).bfloat16() / 4)
    >>> integers[0, :4].tolist(), steps[0, 0].tolist()
    ([0, 1, 2, 3], [0.25, 2.0])
    """
    if weight.dtype != torch.bfloat16 or weight.numel() >= 2**31:
        raise RuntimeError("torch's products with 4 bits are slow in float32, and count elements in 32 bits")
    integers, steps, error = [], [], torch.finfo(weight.dtype).eps
    for rows in weight.split(AT_ONCE):
        groups = rows.float().unflatten(1, (-1, GROUP))  # RuntimeError if they do not fill groups
        low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
        allowed = error * groups.abs().amax(dim=-1, keepdim=True)
        level, step = torch.zeros_like(groups), torch.zeros_like(low)
        found = torch.zeros_like(low, dtype=torch.bool)
        for highest in range(15, 7, -1):  # a grid of fewer steps is part of one of these
            this = ((high - low) / highest).clamp(min=torch.finfo(weight.dtype).tiny)
            nearest = ((groups - low) / this).round()
            fits = ~found & ((low + this * nearest - groups).abs().amax(dim=-1, keepdim=True) <= allowed)
            level, step, found = torch.where(fits, nearest, level), torch.where(fits, this, step), found | fits
            if found.all():
                break
        else:
            raise RuntimeError("these weights do not have 4 bits")
        step = step.to(weight.dtype)
        middle = (groups - (level - 8) * step).mean(dim=-1, keepdim=True).to(weight.dtype)
        if (((level - 8) * step + middle - groups).abs() > 3 * allowed).any():
            raise RuntimeError("their steps are not those of bfloat16")
        integers.append(level.flatten(1).byte())
        steps.append(torch.cat([step, middle], dim=-1).transpose(0, 1))
    return torch.cat(integers), torch.cat(steps, dim=1).contiguous()


# An operator of our own, because inductor takes oneDNN's only with constant weights.
OPERATORS = torch.library.Library("specnb", "FRAGMENT")
OPERATORS.define("packed_linear(Tensor states, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.impl(OPERATORS, "packed_linear", "CompositeExplicitAutograd")
def packed_linear(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(states, packed, bias, "none", [], "")  # type: ignore[no-any-return]


@torch.library.register_fake("specnb::packed_linear", lib=OPERATORS)  # type: ignore[untyped-decorator]
def _(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return states.new_empty(*states.shape[:-1], len(packed))


@torch.no_grad()
def pack(model: nn.Module) -> list[nn.Linear]:
    """Replace the linear layers that are faster on this CPU with packed weights; return the new ones.

    Layers are timed, because what is faster differs between processors. Weights that were read from a
    file with 4 bits are tried with 4 bits, too. Nothing changes off the CPU, in dtypes other than
    float32 and bfloat16, and if memory is short.
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and _can_pack(layer)}
    if sum(layer.weight.nbytes for layer in layers.values()) > psutil.virtual_memory().available / 2:
        return []
    made: list[nn.Linear] = []
    for kind in {(layer.weight.shape, layer.weight.dtype) for layer in layers.values()}:
        alike = {name: layer for name, layer in layers.items() if (layer.weight.shape, layer.weight.dtype) == kind}
        for packed in (PackedLinear, FourBitLinear):
            others: dict[str, nn.Linear] = {}
            for name, layer in alike.items():
                # Not every processor has a layout for every dtype, and most weights have more than 4 bits.
                with contextlib.suppress(RuntimeError):
                    others[name] = packed(layer)
            timed = list(others)[: max(1, TIMED // next(iter(alike.values())).weight.nbytes)]
            if timed:
                usual, other = least_seconds([alike[name] for name in timed], [others[name] for name in timed])
                if other < MARGIN * usual:
                    alike |= others
        for name, layer in alike.items():
            if layer is not layers[name]:
                model.set_submodule(name, layer)
                made.append(layer)
    return made


def _can_pack(layer: nn.Linear) -> bool:
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):  # which a copy would leave out
        return False
    weight = layer.weight
    usual = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return usual and weight.numel() >= SMALLEST and torch.backends.mkldnn.is_available()


def least_seconds(*ways: Sequence[nn.Linear]) -> list[float]:
    """The time of each way to call the same layers: of each layer the least, for few and for more rows."""
    # The time of a thread does not count other programs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = np.full((len(ways), len(ways[0]), len(ROWS)), np.inf)
    start = clock()
    for number in range(ROUNDS):
        if number and clock() > start + SECONDS:
            break
        for of_way, way in zip(least, ways, strict=True):
            for column, rows in enumerate(ROWS):
                for best, layer in zip(of_way, way, strict=True):
                    states = layer.weight.new_ones(1, rows, layer.in_features)
                    began = clock()
                    layer(states)
                    best[column] = min(best[column], clock() - began)
    return least.sum(axis=(1, 2)).tolist()  # type: ignore[no-any-return]


class OneLayer:
    rows, keep_finite = None, False

    def __init__(self, keys: Tensor, values: Tensor, index: tuple[Tensor, Tensor], seen: int) -> None:
        self.keys, self.values, self.index, self.seen = keys, values, index, seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return written_and_seen(self.keys, self.values, key_states, value_states, self)

    def get_seq_length(self, *args: Any) -> int:
        return 0  # as of a `RaggedLayer`


class CompiledLayers:
    """The decoder layers of a model, compiled once for each kind of layer and shape of a pass.

    Passes over `widths` tokens run compiled, others eagerly, and so do layers whose parts have hooks or
    a `forward` of their own. Layers are of one kind if their parts, attributes and hooks are equal, and
    if one computes the same to the last bit with the weights of the other.
    """

    def __init__(self, layers: Sequence[nn.Module], kinds: list[int]) -> None:
        self.kinds = kinds
        self.eager = [layer.forward for layer in layers]
        self.modules = [without_hooks(layer) for layer in layers]  # those of a layer are called outside of it
        self.widths: frozenset[int] = frozenset()
        self.compared: set[int] = set()
        self.ready: dict[tuple[Any, ...], Callable[..., Any]] = {}
        for number, layer in enumerate(layers):
            if not has_code_of_its_own(self.modules[number]):
                layer.forward = partial(self.forward, number)

    @classmethod
    def of(cls, model: PreTrainedModel) -> CompiledLayers | None:
        wanted = decoder_config(model).num_hidden_layers
        for layers in model.modules():
            if isinstance(layers, nn.ModuleList) and len(layers) == wanted:
                descriptions = [_kind(layer) for layer in layers]
                kinds = [descriptions.index(each) for each in descriptions]
                return cls(list(layers), kinds) if len(set(kinds)) <= MOST_KINDS else None
        return None

    def forward(self, number: int, hidden: Tensor, *args: Any, **named: Any) -> Any:
        given: dict[str | int, Any] = dict(enumerate(args)) | named
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
        if len(masks) != 1 or cache.fills or cache.keep_finite or not layer.is_initialized:
            return self.eager[number](hidden, *args, **named)
        tensors = (layer.keys, layer.values, *cache.index, hidden)
        if number not in self.compared:
            if not self._as_its_kind(number, tensors, given, caches[0], masks[0]):
                self.kinds[number] = number
            self.compared.add(number)
        kind = self.kinds[number]
        on_host = hidden.device.type == "cpu"
        # Code has in it what is no tensor among the arguments, which a model may give to some of its layers only.
        key = (kind, hidden.shape, cache.capacity, _plain(given, type), None if on_host else cache.seen)
        if key not in self.ready and on_host and cache.seen == cache.capacity:
            # Code for any number of slots cannot be compiled from a pass that reads all of them.
            key = (*key[:-1], cache.seen)
        if key not in self.ready:
            if key[-1] is None:
                torch._dynamo.mark_dynamic(given[masks[0]], 3)
            self.ready[key] = compiled_once(partial(_run_layer, caches[0], masks[0]), on_host)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings inside the compiler
            return self.ready[key](self.modules[number], *tensors, given)

    def _as_its_kind(self, number: int, tensors: tuple[Any, ...], given: dict[Any, Any], cache: Any, mask: Any) -> bool:
        layer, kind = self.modules[number], self.modules[self.kinds[number]]
        if layer is kind:
            return True
        weights = dict(layer.named_parameters()) | dict(layer.named_buffers())

        def with_weights(hidden: Tensor, *args: Any, **named: Any) -> Any:
            return torch.func.functional_call(kind, weights, (hidden, *args), named)

        keys, values, written, slots, hidden = tensors
        modules: list[Callable[..., Any]] = [layer, with_weights]
        outputs = [_run_layer(cache, mask, each, keys, values, written, slots, hidden, given) for each in modules]
        tuples = [output if isinstance(output, tuple) else (output,) for output in outputs]
        return all(one is other is None or torch.equal(one, other) for one, other in zip(*tuples, strict=True))


def _run_layer(
    cache: str | int, mask: str | int, module: Callable[..., Any], keys: Tensor, values: Tensor, written: Tensor,
    slots: Tensor, hidden: Tensor, given: dict[str | int, Any],
) -> Any:  # fmt: skip
    given = given | {cache: OneLayer(keys, values, (written, slots), given[mask].shape[-1])}
    args = [given[name] for name in range(len(given)) if name in given]
    named = {name: value for name, value in given.items() if isinstance(name, str)}
    return module(hidden, *args, **named)


PLAIN = (bool, int, float, str, type(None))
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"layer_idx"}


def _kind(layer: nn.Module) -> list[Any]:
    parts: list[Any] = []
    for name, part in layer.named_modules():
        attributes = [(key, _plain(value)) for key, value in vars(part).items() if key not in OF_EVERY_MODULE]
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        shapes = [(key, value.shape, value.dtype) for key, value in tensors]
        hooks = [id(hook) for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        parts.append((name, type(part), shapes, hooks, attributes))
    return parts


def _plain(value: Any, other: Callable[[Any], Any] = id) -> Any:
    """`value` as something that can be compared and hashed; what is not made of plain values by `other`."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each, other) for each in value)
    if isinstance(value, dict):
        return tuple((key, _plain(each, other)) for key, each in value.items())
    return value if isinstance(value, PLAIN) else other(value)


def compiled_once(function: Callable[..., Any], on_host: bool) -> Callable[..., Any]:
    """`function` compiled at its first call; later calls check only sizes marked as dynamic."""

    def own(*given: Any) -> Any:
        return function(*given)

    own.__code__ = own.__code__.replace()  # torch keeps what it compiled with this object
    # A small model's layer takes a CPU less time than the Python code that would call its parts.
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "cpp_wrapper": on_host}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


class Captured:
    """A function of CUDA tensors, captured as a graph at its first call and replayed at later ones.

    The first call executes it several times, so what it changes in place must allow that. Later
    calls return the same tensors. There is a graph for each `version`, a number of the host.
    """

    def __init__(self, function: Callable[..., Any], version: Callable[[], int] = lambda: 0) -> None:
        self.function, self.version = function, version
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        version = self.version()
        if version not in self.graphs:
            self.graphs[version] = self._capture(tensors)
        graph, inputs, outputs = self.graphs[version]
        for captured, given in zip(inputs, tensors, strict=True):
            captured.copy_(given)
        graph.replay()
        return outputs

    def _capture(self, tensors: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
        inputs = [tensor.clone() for tensor in tensors]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(CALLS_BEFORE_CAPTURE):
                self.function(*inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            return graph, inputs, self.function(*inputs)
