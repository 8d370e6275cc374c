"""The network of the proof suite, 421 numbers in four layers, on ranks in every way that the library carries."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import mesh

SIZES = (7, 12, 12, 12, 1)
LAYERS = tuple(str(number) for number in range(len(SIZES) - 1))


class Net(nn.Module):
    """In a stage of a pipeline some of the layers, under their names in the whole."""

    def __init__(self, layers: tuple[str, ...] = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {name: nn.Linear(*SIZES[number : number + 2]) for number, name in enumerate(LAYERS)}
        self.layers = nn.ModuleDict({name: made[name] for name in layers})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            inputs = layer(inputs) if name == LAYERS[-1] else torch.tanh(layer(inputs))
        return inputs


def net_of(kind: str) -> tuple[nn.Module, int, int]:
    """And into how many parts a batch is cut, and which of them this rank sees."""
    rank, world = dist.get_rank(), dist.get_world_size()
    two = min(2, world)
    if kind == "ddp":
        # Else it adds gradients in another order from the second step of a process on.
        return DistributedDataParallel(Net(), find_unused_parameters=True), world, rank
    if kind == "fsdp1":
        how = {"use_orig_params": True, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(Net(), device_mesh=mesh(dp=None, shard="auto"), **how), world, rank
    if kind == "hsdp":
        return _sharded(Net(), mesh(dp="auto", shard=two)), world, rank
    if kind == "tp":
        return _split(Net(), mesh(dp=None, tp="auto")["tp"]), 1, 0
    if kind == "fsdp-tp":
        both = mesh(dp=None, shard="auto", tp=two)
        return _sharded(_split(Net(), both["tp"]), both["shard"]), world // two, both.get_local_rank("shard")
    if kind == "pipeline":
        first, end = (-(-len(LAYERS) * one // world) for one in (rank, rank + 1))
        stages = DeviceMesh("cpu", [[one] for one in range(world)], mesh_dim_names=("stage", "shard"))
        return _sharded(Net(LAYERS[first:end]), stages["shard"]), 1, 0
    return _sharded(Net()), world, rank


def through_stages(net: Net, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward and backward, from stage to stage."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank:
        inputs = torch.zeros(len(targets), SIZES[int(next(iter(net.layers)))], requires_grad=True)
        dist.recv(inputs.detach(), rank - 1)
    outputs = net(inputs)
    if rank == last:
        nn.functional.mse_loss(outputs, targets).backward()
    else:
        dist.send(outputs.detach(), rank + 1)
        gradient = torch.zeros_like(outputs)
        dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
    if rank:
        assert inputs.grad is not None
        dist.send(inputs.grad, rank - 1)


def _sharded(net: Net, over: DeviceMesh | None = None) -> Net:
    for layer in net.layers.values():
        fully_shard(layer, mesh=over)
    fully_shard(net, mesh=over)
    return net


def _split(net: Net, over: DeviceMesh) -> Net:
    ways = (ColwiseParallel, RowwiseParallel)
    parallelize_module(net, over, {f"layers.{name}": ways[int(name) % 2]() for name in LAYERS})
    return net
