"""Optimizer states wait on the host: their storage is given back, their values return to the same tensors."""

import torch

from engine.generation.twin.parking import on_host, parked


def test_storages_are_empty_meanwhile_and_values_come_back() -> None:
    states = [torch.randn(7, 3), torch.randn(4)]
    shared = states[0].view(-1)[:5]  # two tensors of one storage
    kept, addresses = [state.clone() for state in states], [id(state) for state in states]
    with on_host([*states, shared, torch.empty(0)]):
        assert [state.untyped_storage().nbytes() for state in states] == [0, 0]
    assert [id(state) for state in states] == addresses
    for state, values in zip(states, kept, strict=True):
        assert torch.equal(state, values)
    assert torch.equal(shared, kept[0].view(-1)[:5])


def test_states_of_a_cpu_optimizer_stay() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    with parked(optimizer):
        assert optimizer.state[parameter]["exp_avg"].untyped_storage().nbytes() == 12
