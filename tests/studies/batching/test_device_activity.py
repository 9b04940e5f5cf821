"""What a device would notice is counted: waits, allocations, launches and shapes."""

from collections.abc import Callable

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
    "those selected by a mask": lambda x: x[x > 1],
}


@pytest.mark.parametrize("read", READS)
def test_a_read_is_one_wait(read: str) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.tensor([1, 2, 3])
            with DeviceActivity() as seen:
                READS[read](x)
        assert seen.waits == 1


def test_new_tensors_and_their_shapes_are_seen_and_views_are_no_work() -> None:
    x = torch.zeros(4, dtype=torch.float64)
    with DeviceActivity() as seen:
        torch.cat([x, x])
        torch.cat([x, x])
    assert (seen.allocated, seen.launches, len(seen.layouts)) == (128, 2, 1)
    with DeviceActivity() as other:
        torch.cat([x, x, x])
    assert not other.layouts & seen.layouts
    with DeviceActivity() as in_place:
        x += 1
        x.mul_(2)
        x[1:3].view(2, 1)
    assert (in_place.waits, in_place.allocated, in_place.launches) == (0, 0, 2)


def test_an_error_passes_and_the_watch_ends() -> None:
    watch = DeviceActivity()
    with pytest.raises(KeyError), watch:
        raise KeyError
    torch.zeros(3).sum()
    assert watch.launches == 0
