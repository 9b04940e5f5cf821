"""A float64 model computes in float64 and nothing less, and is still the same model."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from specnb.models.loading import TRAINED_PAIR, load_model
from specnb_audit.numerics import in_dtype


class Dtypes(TorchFunctionMode):
    """Collects the floating dtypes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*arguments, **(options or {}))
        # What is read from an attribute, such as a float32 buffer, is not computed.
        if isinstance(result, torch.Tensor) and result.is_floating_point() and "__get__" not in str(function):
            self.seen.add(result.dtype)
        return result


@torch.inference_mode()
def test_nothing_is_computed_in_less_than_float64() -> None:
    tokens = torch.arange(1, 65).reshape(2, 32)
    double = load_model(TRAINED_PAIR / "draft", dtype=torch.float64)
    with Dtypes() as dtypes:
        logits = double(tokens).logits
    assert dtypes.seen == {torch.float64}
    single = load_model(TRAINED_PAIR / "draft", packed=False)
    with Dtypes() as dtypes:
        same = single(tokens).logits
    assert torch.float32 in dtypes.seen
    torch.testing.assert_close(logits.float(), same, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_a_copy_in_bfloat16_still_computes() -> None:
    tokens = torch.arange(1, 33)[None]
    double = load_model(TRAINED_PAIR / "draft", dtype=torch.float64)
    rounded = in_dtype(double, torch.bfloat16)(tokens).logits
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), double(tokens).logits, atol=0.5, rtol=0)
