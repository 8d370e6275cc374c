"""What of a state a load can read, and how it reaches the parts."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from elastic_agent.worker.errors import CheckpointMismatch
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
    assert list(part) == ["a", "again", "old"]
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


def test_a_dict_keeps_the_keys_that_are_new_in_the_script() -> None:
    part: dict[str, Any] = {"a": 0, "new": 2, "nested": {"new": 3}}
    load_into(part, {"a": 1, "nested": {"b": 1}})
    assert part == {"a": 1, "new": 2, "nested": {"b": 1}}


def test_what_the_script_holds_of_a_dict_has_the_loaded_values() -> None:
    """Moving averages and queues: the script goes on with the objects that it has put there."""
    shadow, queue, history = {"w": torch.zeros(2), "gone": 1}, torch.zeros(2), [torch.zeros(1)]
    part: dict[str, Any] = {"shadow": shadow, "pair": (queue, 0), "history": history}
    saved = {
        "pair": (torch.full((2,), 5.0), 7),
        "shadow": {"w": torch.full((2,), 3.0), "new": 2},
        "history": [torch.ones(1), torch.ones(1)],
    }
    load_into(part, saved)
    assert list(part) == ["pair", "shadow", "history"]
    assert part["shadow"] is shadow
    assert shadow.keys() == {"w", "new"}
    assert shadow["w"].tolist() == [3.0, 3.0]
    assert part["pair"][0] is queue
    assert (queue.tolist(), part["pair"][1]) == ([5.0, 5.0], 7)
    assert part["history"] is history
    assert [one.item() for one in history] == [1.0, 1.0]


@pytest.mark.parametrize(
    "own",
    [
        torch.zeros(3),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(1).expand(2),
        torch.empty(2, device="meta"),
        torch.zeros(2).to_sparse(),
    ],
    ids=["shape", "dtype", "expanded", "meta", "layout"],
)
def test_a_tensor_that_cannot_take_the_value_is_replaced(own: torch.Tensor) -> None:
    part = {"a": own}
    load_into(part, {"a": torch.full((2,), 5.0)})
    assert part["a"] is not own
    assert part["a"].tolist() == [5.0, 5.0]


def test_a_dict_with_a_modules_own_tensors_does_not_change_the_module() -> None:
    """`best = model.state_dict()`, not cloned: what was the best state once is not what the module has now."""
    model = torch.nn.Linear(2, 2)
    best = {"weights": model.state_dict()}
    now = model.weight.detach().clone()
    saved = {"weights": {key: torch.full_like(one, 9.0) for key, one in model.state_dict().items()}}
    load_into(best, saved, [model])
    assert torch.equal(model.weight, now)
    assert best["weights"]["weight"].unique().tolist() == [9.0]


def optimizers(kind: str) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    made = {
        "SGD": lambda: torch.optim.SGD([weight], lr=0.1, momentum=0.9),
        "Adam": lambda: torch.optim.Adam([weight]),
        "AdamW": lambda: torch.optim.AdamW([weight], lr=0.5, amsgrad=True, foreach=True),
        "RMSprop": lambda: torch.optim.RMSprop([weight]),
    }[kind]()
    weight.grad = torch.ones(2)
    made.step()
    return made


@pytest.mark.parametrize(
    ("saved", "own", "lacks"),
    [
        ("Adam", "SGD", "lacks ['dampening', 'momentum'] of SGD"),
        ("SGD", "Adam", "'betas', "),
        ("Adam", "RMSprop", "lacks ['alpha'] of RMSprop"),
        ("Adam", "AdamW", None),
        ("AdamW", "Adam", None),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved: str, own: str, lacks: str | None) -> None:
    state = optimizers(saved).state_dict()
    state["param_groups"][0]["initial_lr"] = 0.1  # a scheduler's, which this script does not have
    if lacks is None:
        load_into(optimizers(own), state)
    else:
        with pytest.raises(CheckpointMismatch, match="another optimizer's") as caught:
            load_into(optimizers(own), state)
        assert lacks in str(caught.value)


def test_hyperparameters_that_an_older_version_of_torch_did_not_have_are_no_other_optimizers() -> None:
    state = optimizers("Adam").state_dict()
    for name in ("fused", "capturable", "decoupled_weight_decay", "maximize"):
        del state["param_groups"][0][name]
    state["param_groups"][0]["initial_lr"] = 0.1
    load_into(optimizers("Adam"), state)
