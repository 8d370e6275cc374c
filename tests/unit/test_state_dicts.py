"""What of a state a load can read, and how it reaches the parts."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from elastic_agent.worker.state.state_dicts import is_plain, load_into

DENSE = torch.tensor([[0.0, 2.0], [3.0, 0.0]])


@pytest.mark.parametrize(
    "value", [b"", b"abc", "", 2**100, 1j, float("nan"), torch.Size([1]), torch.int8, (), [{}]]
)
def test_what_is_plain_can_be_loaded(value: Any) -> None:
    """Not the other way round: of what is not plain it is found out by a load before each save."""
    stream = io.BytesIO()
    torch.save({"value": value}, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except Exception:
        assert not is_plain({"value": value})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_dict_gets_tensors_of_its_own_in_every_layout(layout: torch.layout) -> None:
    tensor = DENSE if layout is torch.strided else DENSE.to_sparse(layout=layout)
    stream = io.BytesIO()
    torch.save({"a": tensor, "again": [tensor]}, stream)
    stream.seek(0)
    part: dict[str, Any] = {"old": 1}
    loaded = torch.load(stream, weights_only=True)
    load_into(part, loaded)
    assert list(part) == ["a", "again"]
    assert part["a"].layout == tensor.layout
    assert torch.equal(part["a"].to_dense(), DENSE)
    assert part["again"][0] is part["a"]
    assert part["a"] is not loaded["a"]


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_without_names_is_given_none_by_a_state_that_has_them(named: bool) -> None:
    """A converted checkpoint has them; torch lets no group without names be added to groups with."""
    weight = torch.nn.Parameter(torch.ones(2))
    saved = torch.optim.SGD([("weight", weight)], lr=0.5).state_dict()
    optimizer = torch.optim.SGD([("weight", weight)] if named else [weight], lr=0.1)
    load_into(optimizer, saved)
    more = torch.nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [("more", more)] if named else [more]})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert all(("param_names" in group) == named for group in optimizer.param_groups)
