"""The recorder of operations on tensors."""

import torch

from studies.batching.operations import Operation, OperationRecorder


def test_every_operation_is_recorded_with_its_inputs_and_outputs() -> None:
    operations: list[Operation] = []
    one, other = torch.ones(2), torch.zeros(2)
    with OperationRecorder(operations.append):
        total = one + other
        halves = total.chunk(2)
    assert [operation.function.overloadpacket.__name__ for operation in operations] == ["add", "split"]
    assert all(have is want for have, want in zip(operations[0].inputs, (one, other), strict=True))
    assert operations[0].outputs[0] is total
    assert [tensor.shape for tensor in operations[1].outputs] == [half.shape for half in halves]


def test_nothing_is_recorded_outside() -> None:
    operations: list[Operation] = []
    with OperationRecorder(operations.append):
        pass
    torch.ones(2)
    assert not operations
