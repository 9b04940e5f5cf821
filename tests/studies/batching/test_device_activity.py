"""What a device would notice is counted: waits, allocations, launches and shapes."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from studies.batching.device_activity import DeviceActivity

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "index": lambda x: range(x[0]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", READS)
def test_a_read_is_one_wait(read: str, mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode():
        x = torch.tensor([1, 2, 3])
        with DeviceActivity() as seen:
            READS[read](x)
    assert seen.waits == 1


def test_selecting_by_a_mask_waits_for_the_number_of_those_selected() -> None:
    x = torch.arange(4)
    with DeviceActivity() as seen:
        assert len(x[x > 1]) == 2
    assert seen.waits == 1


def test_work_in_place_allocates_nothing_and_views_are_no_work() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    with DeviceActivity() as seen:
        x += 1
        x.mul_(2)
        x[1:3].view(2, 1)
    assert (seen.waits, seen.allocated, seen.launches) == (0, 0, 2)


def test_new_tensors_and_their_shapes_are_seen() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    with DeviceActivity() as seen:
        torch.cat([x, x])
        torch.cat([x, x])
    assert (seen.allocated, seen.launches, len(seen.layouts)) == (128, 2, 1)
    with DeviceActivity() as other:
        torch.cat([x, x, x])
    assert not other.layouts & seen.layouts


def test_an_error_passes_and_the_watch_ends() -> None:
    watch = DeviceActivity()
    with pytest.raises(KeyError), watch:
        raise KeyError
    torch.zeros(3).sum()
    assert watch.launches == 0
