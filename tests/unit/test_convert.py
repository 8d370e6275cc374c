"""A checkpoint of one form, made into one of the other: the same state to the last bit, or nothing."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from elastic_agent.agent.commands.convert import _help, main
from elastic_agent.agent.common.exits import CommandCode
from elastic_agent.worker import Checkpointer, CheckpointMismatch
from elastic_agent.worker.checkpointing.conversion.convert import Refused, convert
from elastic_agent.worker.checkpointing.conversion.whole_state import names_of_parameters
from elastic_agent.worker.errors import BadCheckpoint, CheckpointError, NoUsableCheckpoint
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire.run import Run


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ELASTIC_AGENT") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def parts(net: nn.Module, steps: int = 3) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        "meta": {
            "seen": 5,
            "by_class": {1: torch.arange(3), 2: ()},
            "none": {},
            "half": torch.ones(2, dtype=torch.bfloat16),
        },
    }


def own() -> dict[str, Any]:
    return {"feedback": torch.arange(7), 3: [1, 2]}


def save_replicated(directory: Path, step: int = 10, **more: Any) -> dict[str, Any]:
    found = {**parts(model(step)), "own": own(), **more}
    assert Checkpointer(directory, found, per_rank=["own"]).save(step)
    return found


def payload_of(directory: Path) -> dict[str, Any]:
    (data,) = directory.glob("*.pt")
    found: dict[str, Any] = torch.load(data, weights_only=True)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def state_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: part if isinstance(part, dict) else part.state_dict() for name, part in found.items()}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_and_back_again_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    save_replicated(tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b")
    assert done.splitlines()[0] == (
        f"step 10 of {tmp_path / 'a'} (replicated) is now in {tmp_path / 'b'} (sharded)"
    )
    convert(tmp_path / "b", tmp_path / "c")
    first, second = payload_of(tmp_path / "a"), payload_of(tmp_path / "c")
    rows = [first.pop("ranks"), second.pop("ranks")]
    assert same(first, second)
    assert [len(one) for one in rows] == [1, 1]
    again = {**parts(model(1), steps=0), "own": {}}
    assert Checkpointer(tmp_path / "c", again, per_rank=["own"]).load() == 10
    assert same(again["own"], own())


def test_a_sharded_state_loads_what_was_replicated(tmp_path: Path, group: None) -> None:
    before = save_replicated(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    net = fully_shard(model(1))
    after = {**parts(net, steps=1), "own": {}}
    assert Checkpointer(tmp_path / "b", after, per_rank=["own"]).load() == 10
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
             for name, tensor in net.state_dict().items()}  # fmt: skip
    assert same(whole, dict(before["model"].state_dict()))
    kept = before["optimizer"].state_dict()["state"]
    for number, state in after["optimizer"].state_dict()["state"].items():
        assert same(kept[number]["exp_avg"], state["exp_avg"].full_tensor())
        assert same(kept[number]["step"], state["step"])
    for name in ("meta", "own"):
        assert same(after[name], before[name])


def test_a_replicated_state_loads_what_was_sharded(tmp_path: Path, group: None) -> None:
    net = fully_shard(model(1))
    before = parts(net)
    assert Checkpointer(tmp_path / "a", before).save(7)
    Checkpointer(tmp_path / "a", before).wait()
    convert(tmp_path / "a", tmp_path / "b")
    after = parts(model(2), steps=1)
    assert Checkpointer(tmp_path / "b", after).load() == 7
    for (name, tensor), (other_name, other) in zip(
        net.state_dict().items(), after["model"].state_dict().items(), strict=True
    ):
        assert name == other_name
        assert same(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, other)
    kept = before["optimizer"].state_dict()["state"]
    for number, state in after["optimizer"].state_dict()["state"].items():
        assert same(kept[number]["exp_avg_sq"].full_tensor(), state["exp_avg_sq"])
    assert same(after["meta"], before["meta"])
    assert same(after["scheduler"].state_dict(), before["scheduler"].state_dict())


def test_dcp_loads_what_was_replicated(tmp_path: Path) -> None:
    before = save_replicated(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    (attempt,) = (path for path in (tmp_path / "b").iterdir() if path.is_dir())
    after = parts(model(1), steps=1)
    of_model, of_optimizer = get_state_dict(after["model"], after["optimizer"])
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=attempt, no_dist=True)
    set_state_dict(
        after["model"], after["optimizer"],
        model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    for name in ("model", "optimizer"):
        assert same(dict(state_of(after)[name]), dict(state_of(before)[name]))


def dcp_directory(folder: Path) -> dict[str, Any]:
    before = parts(model(3))
    of_model, of_optimizer = get_state_dict(before["model"], before["optimizer"])
    dcp.save(
        {"model": of_model, "optimizer": of_optimizer, "meta": {"seen": 5}},
        checkpoint_id=folder,
        no_dist=True,
    )
    return before


@pytest.mark.parametrize("to", ["replicated", "sharded"])
def test_what_dcp_has_saved_is_a_checkpoint_of_ours(tmp_path: Path, to: Any) -> None:
    before = dcp_directory(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to=to, step=12)
    if to == "sharded":
        convert(tmp_path / "b", tmp_path / "c")
    after = parts(model(4), steps=1)
    net = {name: after[name] for name in ("model", "optimizer")} | {"meta": {}}
    assert Checkpointer(tmp_path / ("b" if to == "replicated" else "c"), net).load() == 12
    (group,) = after["optimizer"].param_groups
    assert "param_names" not in group, "it has none of its own"
    for name in ("model", "optimizer"):
        assert same(dict(state_of(after)[name]), dict(state_of(before)[name]))
    assert net["meta"] == {"seen": 5}


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE"],)


@pytest.mark.parametrize("content", [Hostile(), {"state_dict_metadata": Hostile()}, 5, None])
def test_an_index_that_is_none_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path / "was-here"))
    dcp_directory(tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointMismatch, match=r"\.metadata is no index of torch"):
        convert(tmp_path / "a", tmp_path / "b", step=1)
    assert not (tmp_path / "was-here").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("damage", ["lost", "short"])
def test_a_directory_of_dcp_that_lacks_bytes_is_refused(tmp_path: Path, damage: str) -> None:
    dcp_directory(tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    if damage == "lost":
        data.unlink()
    else:
        os.truncate(data, data.stat().st_size - 10)
    with pytest.raises((Refused, CheckpointMismatch)):
        convert(tmp_path / "a", tmp_path / "b", step=1)
    assert not (tmp_path / "b").exists()


def test_pieces_that_overlap_are_refused(tmp_path: Path) -> None:
    """As many elements as the tensor has, and one row of it in no file."""
    dcp.save({"table": {"rows": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    index = FileSystemReader(tmp_path / "a").read_metadata()
    (rows,) = index.state_dict_metadata.values()
    rows.size = torch.Size([4, 3])
    rows.chunks.append(rows.chunks[0])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointMismatch, match=r"a: two pieces of 'table\.rows' overlap"):
        convert(tmp_path / "a", tmp_path / "b", step=1)
    assert not (tmp_path / "b").exists()


def test_a_tensor_of_which_some_is_in_no_file_is_refused(tmp_path: Path) -> None:
    dcp.save({"table": {"rows": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "a", no_dist=True)
    index = FileSystemReader(tmp_path / "a").read_metadata()
    (rows,) = index.state_dict_metadata.values()
    rows.size = torch.Size([4, 3])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointMismatch, match=r"6 of 12 elements of 'table\.rows' are in no file"):
        convert(tmp_path / "a", tmp_path / "b", step=1)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_what_cannot_be_read_is_named_with_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    dcp_directory(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / name).mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--step=1"]) == CommandCode.FAILED
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert capsys.readouterr().err == (
        f"elastic-agent convert: {tmp_path / 'a'} cannot be read: [Errno 21] Is a directory: {name!r}\n"
    )


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("to", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), CommandCode.INTERRUPTED, "interrupted"),
        (OSError(28, "No space left on device"), CommandCode.FAILED, "b cannot be written: [Errno 28] No space"),
    ],
    ids=["Ctrl-C", "full"],
)  # fmt: skip
def test_a_conversion_that_does_not_end_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: CommandCode,
    text: str,
    to: str,
    is_there: bool,
) -> None:
    dcp_directory(tmp_path / "a")
    if is_there:
        (tmp_path / "b").mkdir()

    def publish(*_: object) -> None:
        raise error

    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--step=1", f"--to={to}"]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "publish", publish)
        assert main(words) == code
    assert text in capsys.readouterr().err
    assert (tmp_path / "b").exists() == is_there
    assert main(words) == CommandCode.DONE


def test_the_files_of_a_dcp_index_are_in_its_directory(tmp_path: Path) -> None:
    dcp_directory(tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    raw = (tmp_path / "a" / ".metadata").read_bytes()
    data.rename(tmp_path / "0_0.distcp")
    (tmp_path / "a" / ".metadata").write_bytes(raw.replace(b"__0_0.distcp", b"../0_0.distc"))
    with pytest.raises(CheckpointMismatch, match="no file of its directory"):
        convert(tmp_path / "a", tmp_path / "b", step=1)


def test_names_are_asked_for_where_numbers_do_not_tell_them(tmp_path: Path) -> None:
    net = model(1)
    weights = [weight for weight in net.parameters() if weight.dim() > 1]
    others = [weight for weight in net.parameters() if weight.dim() <= 1]
    found = {
        "model": net,
        "optimizer": torch.optim.SGD([{"params": weights}, {"params": others, "lr": 1.0}], lr=0.1),
    }
    assert Checkpointer(tmp_path / "a", found).save(1)
    with pytest.raises(CheckpointMismatch, match="--parameter-names FILE"):
        convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").iterdir())
    names = {weight: name for name, weight in net.named_parameters()}
    order = [names[weight] for weight in (*weights, *others)]
    with pytest.raises(CheckpointMismatch, match="6 parameters, and 5 names"):
        convert(tmp_path / "a", tmp_path / "c", parameter_names=order[1:])
    convert(tmp_path / "a", tmp_path / "d", parameter_names=order)
    convert(tmp_path / "d", tmp_path / "e")
    assert same(payload_of(tmp_path / "a"), payload_of(tmp_path / "e"))


def test_nothing_is_overwritten_and_nothing_made_again(tmp_path: Path) -> None:
    save_replicated(tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(Refused, match="not empty"):
        convert(tmp_path / "a", tmp_path / "full")
    with pytest.raises(Refused, match="replicated already"):
        convert(tmp_path / "a", tmp_path / "b", to="replicated")
    with pytest.raises(NoUsableCheckpoint, match="no checkpoint of step 3: it has 10"):
        convert(tmp_path / "a", tmp_path / "b", step=3)
    with pytest.raises(NoUsableCheckpoint, match="has no checkpoint"):
        convert(tmp_path / "nowhere", tmp_path / "b")
    dcp_directory(tmp_path / "dcp")
    with pytest.raises(Refused, match="add --step N"):
        convert(tmp_path / "dcp", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("form", ["replicated", "sharded"])
def test_what_is_damaged_is_not_converted(tmp_path: Path, form: str) -> None:
    save_replicated(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    source = tmp_path / ("a" if form == "replicated" else "b")
    (data,) = (*source.glob("*.pt"), *source.glob("*/__0_0.distcp"))
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(BadCheckpoint):
        convert(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_the_converted_is_a_checkpoint_of_its_own_run(tmp_path: Path) -> None:
    save_replicated(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    manifest = CheckpointFiles(tmp_path / "b", keep=1, run=Run("x")).newest_manifest()
    assert manifest is not None
    assert manifest.run.startswith("converted-")
    assert (manifest.step, manifest.is_sharded) == (10, True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_replicated(tmp_path / "a")
    (tmp_path / "names").write_text("\n".join(name for name, _ in model(1).named_parameters()) + "\n")
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--to=sharded", "--step", "10"]
    assert main([*words, "--parameter-names", str(tmp_path / "names")]) == CommandCode.DONE
    assert "is now in" in capsys.readouterr().out
    assert main(words) == CommandCode.FAILED
    assert "not empty" in capsys.readouterr().err
    assert main(["--help"]) == CommandCode.DONE
    assert "Exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [[], ["a"], ["a", "b", "c"], ["a", "b", "--to", "x"], ["a", "b", "--step", "x"], ["a", "b", "--step", "-1"],
     ["a", "b", "--step"], ["a", "b", "--other", "x"], ["a", "b", "--parameter-names", "/does/not/exist"]],
)  # fmt: skip
def test_a_command_line_that_cannot_be(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == CommandCode.BAD_CONFIG
    assert capsys.readouterr().err.startswith("elastic-agent convert: ")


def test_a_name_of_a_parameter_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    (tmp_path / "names").write_text("head.scale by row\r\n\n  body.weight \n")
    monkeypatch.setattr(
        "elastic_agent.worker.checkpointing.conversion.convert.convert",
        lambda *_, parameter_names, **__: given.append(parameter_names),
    )
    assert main(["a", "b", f"--parameter-names={tmp_path / 'names'}"]) == CommandCode.DONE
    assert given == [["head.scale by row", "body.weight"]]


def test_errors_of_a_conversion_are_errors_of_checkpoints() -> None:
    assert issubclass(Refused, CheckpointError)


def test_a_script_whose_state_is_of_the_other_form_is_told_of_this_command(
    tmp_path: Path, group: None
) -> None:
    save_replicated(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointMismatch, match="`elastic-agent convert` makes"):
        Checkpointer(tmp_path / "b", {**parts(model(1)), "own": {}}, per_rank=["own"]).load()
    with pytest.raises(CheckpointMismatch, match="`elastic-agent convert` makes"):
        Checkpointer(tmp_path / "a", {**parts(fully_shard(model(1))), "own": {}}, per_rank=["own"]).load()


def three_alike() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))


def with_momenta(net: nn.Module, weights: list[Any]) -> dict[str, Any]:
    """Those of the model's parameters are 1, 2, 3, whatever their order in the optimizer is."""
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for number, weight in enumerate(net.parameters()):
        optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, number + 1.0)
    return {"model": net, "optimizer": optimizer}


def test_an_order_that_the_shapes_do_not_settle_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = three_alike()
    assert Checkpointer(tmp_path / "a", with_momenta(net, list(net.parameters())[::-1])).save(1)
    words = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == CommandCode.DONE
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "--parameter-names" in line)
    assert line == (
        "the numbers of part 'optimizer' were taken for the parameters of 'model' in their order, which is not "
        "certain: 0.weight and 1.weight have the same shape. If the optimizer has another order, convert again with "
        "--parameter-names FILE"
    )
    (tmp_path / "names").write_text("2.weight\n1.weight\n0.weight\n")
    assert main([words[0], str(tmp_path / "c"), f"--parameter-names={tmp_path / 'names'}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    convert(tmp_path / "c", tmp_path / "d")
    assert same(payload_of(tmp_path / "d"), payload_of(tmp_path / "a"))
    assert "a line of the output says so" in _help()


@pytest.mark.parametrize("case", ["shapes differ", "names are written down", "nothing is kept", "sharded"])
def test_an_order_that_is_certain_is_not_spoken_of(tmp_path: Path, group: None, case: str) -> None:
    net: Any = three_alike() if case != "shapes differ" else nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    if case == "sharded":
        net = fully_shard(net)
    found: Any = net.named_parameters() if case == "names are written down" else net.parameters()
    optimizer = torch.optim.SGD(found, lr=0.1, momentum=0.0 if case == "nothing is kept" else 0.9)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoints = Checkpointer(tmp_path / "a", {"model": net, "optimizer": optimizer})
    assert checkpoints.save(1)
    assert checkpoints.wait()
    assert "were taken for" not in convert(tmp_path / "a", tmp_path / "b")
    back = convert(tmp_path / "b", tmp_path / "c")
    assert "were taken for" not in back


def test_a_parameter_whose_state_shows_no_shape_may_be_any_other() -> None:
    """As Adafactor keeps rows and columns of a matrix."""
    weights = {"one": torch.ones(2, 3), "two": torch.ones(4, 5)}
    kept = {0: {"row_var": torch.ones(2)}, 1: {"row_var": torch.ones(4)}}
    optimizer = {"state": kept, "param_groups": [{"params": [0, 1]}]}
    numbering = names_of_parameters("optimizer", {"model": weights, "optimizer": optimizer})
    assert numbering.names == {0: "one", 1: "two"}
    assert "one and two cannot be told apart" in numbering.doubt


class Awkward(nn.Module):
    """Whose optimizer's names nothing tells but its own state: tied, frozen, with a buffer of floats."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.frozen(self.body(self.embedding(tokens) * self.scale)))
        return found


def awkward(seed: int, *, shard: bool, steps: int = 3, named: bool = False) -> dict[str, Any]:
    net: nn.Module = Awkward(seed)
    if shard:
        net = fully_shard(net)
    decayed = [one for one in net.named_parameters() if one[1].requires_grad and one[1].dim() > 1]
    others = [one for one in net.named_parameters() if one[1].requires_grad and one[1].dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": one if named else [weight for _, weight in one]} for one in (others, decayed)
    ]
    groups[0]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.arange(5)).square().mean().backward()
        optimizer.step()
    return {"model": net, "optimizer": optimizer}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def momenta(found: dict[str, Any]) -> dict[str, Any]:
    """By name in the model."""
    names = {weight: name for name, weight in found["model"].named_parameters()}
    return {
        names[weight]: {key: whole(one) for key, one in kept.items()}
        for weight, kept in found["optimizer"].state.items()
    }


@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
def test_names_that_a_sharded_state_has_come_back_to_it(tmp_path: Path, group: None, named: bool) -> None:
    before = awkward(1, shard=True, named=named)
    checkpoints = Checkpointer(tmp_path / "a", before)
    assert checkpoints.save(4)
    assert checkpoints.wait()
    convert(tmp_path / "a", tmp_path / "b")
    said = convert(tmp_path / "b", tmp_path / "c")
    assert "were taken for" not in said
    for to_named in (False, True):
        for form, shard in (("b", False), ("c", True)):
            after = awkward(2, shard=shard, steps=1, named=to_named)
            assert Checkpointer(tmp_path / form, after).load() == 4
            assert same(momenta(after), momenta(before))
            assert [one["weight_decay"] for one in after["optimizer"].param_groups] == [0.0, 0.01]
            after["model"](torch.arange(5)).sum().backward()
            after["optimizer"].step()
            again = Checkpointer(tmp_path / f"again-{form}-{to_named}", after)
            assert again.save(5)
            assert again.wait()
    convert(tmp_path / "c", tmp_path / "d")
    assert same(payload_of(tmp_path / "b"), payload_of(tmp_path / "d"))


def test_dcp_loads_an_optimizer_that_had_names(tmp_path: Path) -> None:
    before = awkward(1, shard=False, named=True)
    assert Checkpointer(tmp_path / "a", before).save(4)
    convert(tmp_path / "a", tmp_path / "b")
    (attempt,) = (path for path in (tmp_path / "b").iterdir() if path.is_dir())
    after = awkward(2, shard=False, steps=1, named=True)
    of_model, of_optimizer = get_state_dict(after["model"], after["optimizer"])
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=attempt, no_dist=True)
    set_state_dict(
        after["model"], after["optimizer"],
        model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    assert same(momenta(after), momenta(before))
