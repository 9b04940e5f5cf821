"""What is timed is the same distribution on both sides; times are not asserted."""

import torch

from specnb.distributions import standardise
from studies.speed.filter_times import SETTINGS, measure, of_transformers


def test_both_sides_make_the_same_distribution() -> None:
    logits = 3 * torch.randn(3, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sampling in SETTINGS.values():
        torch.testing.assert_close(of_transformers(sampling, logits.clone()), standardise(logits, sampling))


def test_there_is_a_row_for_each_setting() -> None:
    threads = torch.get_num_threads()
    found = list(measure("2000", rounds=1))
    assert [row["filters"] for row in found] == list(SETTINGS)
    assert found[0]["to_temperature"] == 1
    assert all(row["ms"] > 0 and row["transformers_ms"] > 0 for row in found)
    assert [row["kept"] for row in found[:2]] == [2000, 20]
    assert torch.get_num_threads() == threads
