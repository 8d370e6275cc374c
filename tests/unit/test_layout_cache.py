"""A layout that was taken over from the state before is the layout that torch would make, byte by byte."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elastic_agent.worker.state import archive_layout
from elastic_agent.worker.state.archive_layout import Layout, LayoutCache, lay_out

_ID = re.compile(rb"(serialization_idFB.{2}Z*)\d{40}(PK\x07\x08).{4}", re.DOTALL)


class Training:
    """A state as scripts have it: tied weights, views of one memory, an optimizer, a scheduler, plain data."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
        )
        self.model[2].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        table = torch.arange(10.0)
        self.meta: dict[str, Any] = {
            "table": table,
            "part": table[2:5],
            "again": table,
            "empty": torch.zeros(0),
            "no numbers": ("text", None, True, b"bytes", torch.float16, ()),
            "numbers": [0, -1, 255, 65535, 1 << 40, 0.5, float("nan"), -0.0],
            "twice": [shared := [7], shared],
            5: {"x": 1},
        }
        self.steps = 9
        self.train()

    def train(self) -> None:
        self.model(torch.rand(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1

    def payload(self) -> dict[str, Any]:
        return {
            "step": self.steps,
            "state": {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "meta": dict(self.meta),
            },
            "rng": [torch.randint(255, (50,), dtype=torch.uint8)],
        }


def file_of(layout: Layout) -> bytes:
    raw = bytearray(layout.size)
    layout.copy_to(memoryview(raw), torch.frombuffer(raw, dtype=torch.uint8))
    return bytes(raw)


def without_id(file: bytes) -> bytes:
    """torch puts a hash of its checksums into the file, which is the only thing that may stay behind."""
    cleared, count = _ID.subn(rb"\1\2", file)
    assert count == 1
    identity = re.search(rb"serialization_idFB.{2}Z*(\d{40})PK\x07\x08(.{4})", file, re.DOTALL)
    assert identity is not None
    # The same checksum in the directory.
    return cleared.replace(identity[2], b"", 1)


def assert_is_what_torch_lays_out(layout: Layout, payload: Any) -> None:
    file = file_of(layout)
    assert without_id(file) == without_id(file_of(lay_out(payload)))
    expected = io.BytesIO()
    torch.save(payload, expected)
    found = io.BytesIO()
    torch.save(torch.load(io.BytesIO(file), weights_only=True), found)
    again = io.BytesIO()
    torch.save(torch.load(io.BytesIO(expected.getvalue()), weights_only=True), again)
    assert found.getvalue() == again.getvalue()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The states that torch has laid out from the beginning."""
    counted: list[int] = []

    def counting(payload: Any) -> Layout:
        counted.append(payload["step"])
        return lay_out(payload)

    monkeypatch.setattr(archive_layout, "lay_out", counting)
    return counted


def nothing(_: Training) -> None:
    pass


def one_more_step(training: Training) -> None:
    training.train()


def numbers(*new: float) -> Callable[[Training], None]:
    return lambda training: training.meta.update({"numbers": [*new, *training.meta["numbers"][len(new) :]]})


def in_meta(name: Any, value: Callable[[dict[str, Any]], Any]) -> Callable[[Training], None]:
    return lambda training: training.meta.update({name: value(training.meta)})


def untie(training: Training) -> None:
    training.model[2].weight = torch.nn.Parameter(training.model[0].weight.detach().clone())


def lower_learning_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 1e-9


def other_order(training: Training) -> None:
    training.meta["table"] = training.meta.pop("table")


def freeze(training: Training) -> None:
    training.meta["table"].requires_grad_()


REUSED = {
    "nothing": nothing,
    "a step": one_more_step,
    "the learning rate": lower_learning_rate,
    "numbers of the same length": numbers(
        255, -(1 << 31), 0, 256, 1 << 40, float("-inf"), -0.0, float("nan")
    ),
    "a number that is a key": in_meta(5, lambda meta: {"x": 200}),
    "another tensor of that kind": in_meta("empty", lambda _: torch.zeros(0)),
    "a large number": in_meta("numbers", lambda meta: [*meta["numbers"][:4], 1 << 41, *meta["numbers"][5:]]),
    "a bool": in_meta("no numbers", lambda _: ("text", None, False, b"bytes", torch.float16, ())),
    "a text": in_meta("no numbers", lambda _: ("next", None, True, b"bytes", torch.float16, ())),
    "bytes": in_meta("no numbers", lambda _: ("text", None, True, b"bites", torch.float16, ())),
    "where a view begins": in_meta("part", lambda meta: meta["table"][3:6]),
    "a tensor that wants a gradient": freeze,
    "another order": other_order,
}
ANEW = {
    "a longer number": numbers(256),
    "a number that is no int any more": numbers(0.0),
    "a bool in a number's place": numbers(True),
    "a dtype as a value": in_meta("no numbers", lambda _: ("text", None, True, b"bytes", torch.half, 1)),
    "a list that grows": in_meta("numbers", lambda meta: [*meta["numbers"], 1]),
    "a list that was a tuple": in_meta("numbers", lambda meta: tuple(meta["numbers"])),
    "a new tensor": in_meta("new", lambda _: torch.ones(2)),
    "a tensor's dtype": in_meta("table", lambda meta: meta["table"].to(torch.int32)),
    "a tensor's shape": in_meta("again", lambda meta: meta["table"].view(2, 5)),
    "a tensor's strides": in_meta("again", lambda meta: meta["table"][::2]),
    "a view that is a tensor of its own": in_meta("part", lambda meta: meta["table"][2:5].clone()),
    "the same tensor as another object": in_meta("again", lambda meta: meta["table"].view(10)),
    "a list that was shared": in_meta("twice", lambda _: [[7], [7]]),
    "an empty tensor that is filled": in_meta("empty", lambda _: torch.zeros(1)),
    "a tensor that is a parameter": in_meta("table", lambda meta: torch.nn.Parameter(meta["table"])),
    "weights that were tied": untie,
    "another memory, of the same size": in_meta("again", lambda meta: meta["table"].clone()),
}


@pytest.mark.parametrize("change", REUSED.values(), ids=REUSED.keys())
def test_what_has_only_other_contents_and_numbers_is_not_laid_out_anew(
    change: Callable[[Training], None], counted: list[int]
) -> None:
    training, layouts = Training(), LayoutCache()
    layouts.lay_out(training.payload())
    training.train()
    change(training)
    for _ in range(2):
        payload = training.payload()
        assert_is_what_torch_lays_out(layouts.lay_out(payload), payload)
        training.train()
    assert len(counted) == 1


@pytest.mark.parametrize("change", ANEW.values(), ids=ANEW.keys())
def test_another_form_is_laid_out_anew(change: Callable[[Training], None], counted: list[int]) -> None:
    training, layouts = Training(), LayoutCache()
    for _ in range(3):
        layouts.lay_out(training.payload())
        training.train()
    assert len(counted) == 1
    change(training)
    for _ in range(3):
        payload = training.payload()
        assert_is_what_torch_lays_out(layouts.lay_out(payload), payload)
        training.train()
    assert len(counted) == 2


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.uint16),
        torch.ones(2).untyped_storage(),
    ],
    ids=["conjugated", "sparse", "of a new dtype", "no tensor"],
)
def test_what_is_not_known_in_every_detail_is_laid_out_by_torch(value: Any, counted: list[int]) -> None:
    layouts = LayoutCache()
    for step in range(4):
        layouts.lay_out({"step": step, "value": value})
    assert counted == [0, 1, 2, 3]


def test_a_file_with_another_pickle_than_expected_is_no_template(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a torch that pickles tensors in another way."""
    monkeypatch.setattr(archive_layout, "location_tag", lambda _: "moon")
    layouts = LayoutCache()
    for step in range(4):
        layouts.lay_out({"step": step, "value": torch.ones(3)})
    assert counted == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [torch.Size([2]), 1j, {1}, OrderedDict(a=torch.ones(2))],
    ids=["size", "complex", "set", "ordered"],
)
def test_whatever_torch_pickles_beside_tensors_may_be_in_the_state(value: Any, counted: list[int]) -> None:
    layouts = LayoutCache()
    for step in range(3):
        payload = {"step": step, "value": value}
        assert without_id(file_of(layouts.lay_out(payload))) == without_id(file_of(lay_out(payload)))
    assert counted == [0]


def test_a_template_keeps_no_tensor_alive() -> None:
    layouts = LayoutCache()
    value = torch.ones(3)
    for step in range(3):
        layouts.lay_out({"step": step, "value": value})
    memory = StorageWeakRef(value.untyped_storage())
    del value
    assert memory.expired()


def saved_by_torch(payload: Any) -> bytes:
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def records_or_error(save: Callable[[Any], bytes], payload: Any) -> dict[str, bytes] | tuple[type, str]:
    """All that the archive holds; or what was raised in its place."""
    try:
        file = save(payload)
    except Exception as error:
        return type(error), str(error)
    reader = torch._C.PyTorchFileReader(io.BytesIO(file))
    names = set(reader.get_all_records()) - {".data/serialization_id"}
    return {name: reader.get_record(name) for name in names}


class Attributed(torch.Tensor):
    """A subclass, as scripts make them."""


def floats() -> torch.Tensor:
    return torch.arange(8.0)


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


def with_hook(tensor: torch.Tensor) -> torch.Tensor:
    tensor.requires_grad_().register_hook(lambda gradient: gradient)
    return tensor


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def of_one_array(first: str, second: str) -> list[torch.Tensor]:
    """Two storages over the same bytes."""
    array = bytearray(64)
    return [torch.frombuffer(array, dtype=getattr(torch, dtype)) for dtype in (first, second)]


def arranged(places: str) -> list[torch.Tensor]:
    """Tensors over as many storages as there are letters, all of one size."""
    storages = {letter: floats() * ord(letter) for letter in sorted(set(places))}
    return [storages[letter].view(2, 4) for letter in places]


def two_dtypes_of_one_storage() -> list[Any]:
    first = floats()
    numbers = torch.arange(4)
    return [
        {"w": first, "n": numbers, "v": first[:4]},
        {"w": first, "n": numbers, "v": first.view(torch.int64)[:4]},
        {"w": first, "n": numbers, "v": first[:4]},
    ]


SERIES: dict[str, Callable[[], list[Any]]] = {
    "two dtypes of one storage": two_dtypes_of_one_storage,
    "two dtypes of two storages with the same bytes": lambda: [
        [*of_one_array("float32", "float32"), torch.zeros(8, dtype=torch.int64)],
        [*of_one_array("float32", "int64"), torch.zeros(16)],
        [*of_one_array("float32", "float32"), torch.zeros(8, dtype=torch.int64)],
    ],
    "two dtypes of one storage, one a parameter's": lambda: [
        [torch.nn.Parameter(first := floats()), torch.zeros(8, dtype=torch.int32), first],
        [torch.nn.Parameter(first := floats()), floats().int(), first.view(torch.int32)],
    ],
    "two dtypes without memory": lambda: [
        [emptied(floats()), emptied(floats().int())],
        [emptied(floats()), emptied(floats().int())],
    ],
    "memory that was given back": lambda: [[floats(), floats()], [emptied(floats()), floats()]] * 2,
    "a storage": lambda: [[floats()], [floats().untyped_storage()], [floats()]],
    "a storage of a tensor beside it": lambda: [[floats()], [it := floats(), it.untyped_storage()]],
    "a typed storage": lambda: [[floats()], [floats()._typed_storage()], [floats()]],
    "no device": lambda: [[floats()], [torch.zeros(8, device="meta")], [floats()]],
    "a subclass": lambda: [[floats()], [floats().as_subclass(Attributed)], [floats()]],
    "a subclass with an attribute": lambda: [
        [floats()],
        [with_attribute(floats().as_subclass(Attributed))],
    ],
    "an attribute": lambda: [[floats()], [with_attribute(floats())], [floats()]],
    "a parameter's attribute": lambda: [
        [torch.nn.Parameter(floats())],
        [with_attribute(torch.nn.Parameter(floats()))],
        [torch.nn.Parameter(floats())],
    ],
    "a hook": lambda: [[floats().requires_grad_()], [with_hook(floats())], [floats().requires_grad_()]],
    "a parameter's hook": lambda: [
        [torch.nn.Parameter(floats())],
        [with_hook(torch.nn.Parameter(floats()))],
    ],
    "a buffer": lambda: [[floats()], [torch.nn.Buffer(floats())], [floats()]],
    "zeros without memory": lambda: [[floats()], [torch._efficientzerotensor((8,))], [floats()]],
    "a negated view": lambda: [[floats()], [torch.imag(torch.zeros(4, dtype=torch.complex64).conj())]],
    "a tie that goes and comes": lambda: [arranged("aab"), arranged("abc"), arranged("aab")],
    "another arrangement of as many storages": lambda: [
        arranged("aab"),
        arranged("aba"),
        arranged("abb"),
        arranged("aab"),
    ],
    "one object again": lambda: [
        [one := floats(), one],
        [one := floats(), one.view(8)],
        [floats(), floats()],
    ],
    "more than ten storages": lambda: [
        arranged("abcdefghijkla"),
        arranged("abcdefghijkll"),
        arranged("abcdefghijkaa"),
    ],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("series", SERIES.values(), ids=SERIES.keys())
def test_each_of_a_series_is_what_torch_saves_or_its_error(series: Callable[[], list[Any]]) -> None:
    states = series()
    layouts = LayoutCache()
    for payload in [states[0], states[0], *states]:
        found = records_or_error(lambda one: file_of(layouts.lay_out(one)), payload)
        assert found == records_or_error(saved_by_torch, payload)
