"""Collectives that training scripts keep writing for themselves, on torch's own.

    from elastic_agent.worker.collectives import all_gather, gather_all_tensors, reduce, register_comm_hook

All of them return what a single process would compute where there is no process group. `group` is a process group of
torch; None is the default one. Each is a collective: every rank of the group must call it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from .state.hook_state import HookState

_V = TypeVar("_V", torch.Tensor, int, float)

MEANS = ("avg", "mean")
FORM_NUMBERS = 2 + 64
"""What a rank says of its tensor: dtype, number of dimensions, and their sizes. torch has 64 dimensions at most."""


def is_distributed() -> bool:
    """There is a default process group."""
    return dist.is_available() and dist.is_initialized()


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, sync_grads: bool = False
) -> torch.Tensor:
    """The tensors of all ranks, of one shape, stacked in the order of ranks: (world size, *tensor.shape).

    With `sync_grads` the gradient flows back: each rank gets the sum of what all ranks' losses contribute to its
    tensor. Without it the result has no gradient.
    """
    _require_member(group)
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_distributed():
        return tensor.unsqueeze(0) if sync_grads else tensor.detach().unsqueeze(0)
    if sync_grads:
        gather: Callable[..., tuple[torch.Tensor, ...]] = _AllGather.apply
        return torch.stack(gather(tensor, group))
    return torch.stack(_gathered(tensor.detach(), group))


def gather_all_tensors(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank, where they have the same number of dimensions and one dtype, but may differ
    in size. Without gradients.

    Raises ValueError, on every rank, where dtypes or numbers of dimensions differ.
    """
    _require_member(group)
    mine = tensor.detach().resolve_conj().resolve_neg()
    if not is_distributed():
        return [mine]
    form = [zlib.crc32(str(mine.dtype).encode()), mine.dim(), *mine.shape]
    form += [0] * (FORM_NUMBERS - len(form))
    forms = [row.tolist() for row in _gathered(torch.tensor(form, device=_device(group)), group)]
    if len({(dtype, dimensions) for dtype, dimensions, *_ in forms}) > 1:
        others = [f"rank {rank}: {row[1]} dimensions" for rank, row in enumerate(forms)]
        raise ValueError(
            f"tensors of one dtype and number of dimensions are gathered, not {', '.join(others)}"
        )
    shapes = [tuple(row[2 : 2 + mine.dim()]) for row in forms]
    if len(set(shapes)) == 1:
        return _gathered(mine, group)
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    missing = [(0, most - size) for most, size in zip(largest, mine.shape, strict=True)]
    padding = [edge for pair in reversed(missing) for edge in pair]  # torch pads the last dimension first
    rows = _gathered(F.pad(mine, padding), group)
    return [row[tuple(map(slice, shape))].clone() for row, shape in zip(rows, shapes, strict=True)]


def reduce(value: _V, group: dist.ProcessGroup | None = None, op: dist.ReduceOp | str = "sum") -> _V:
    """The values of all ranks, reduced to one that every rank gets; `value` itself stays as it is.

    `op` is one of torch's, or "sum", "avg", "mean", "min", "max", "product". A number in gives a number, a float: one
    rank's 0 may meet another's 0.5. The mean of a tensor of whole numbers has torch's default type.
    Raises ValueError for another `op`, and on a rank that is not in the group.
    """
    _require_member(group)
    mean = op in MEANS or op == dist.ReduceOp.AVG
    operation = _operation("sum" if mean else op)
    if isinstance(value, torch.Tensor):
        total = value.detach().clone()
        if mean and not total.is_floating_point() and not total.is_complex():
            total = total.to(torch.get_default_dtype())
    else:
        total = torch.tensor(float(value), dtype=torch.float64, device=_device(group))
    if is_distributed():
        total = total.contiguous()
        dist.all_reduce(total, operation, group)
        if mean:  # gloo has no AVG
            total /= dist.get_world_size(group)
    return total if isinstance(value, torch.Tensor) else total.item()  # type: ignore[return-value]


def register_comm_hook(
    model: torch.nn.Module,
    state: object = None,
    hook: Callable[..., Any] | None = None,
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> HookState:
    """Have DDP reduce its gradients by `hook`, inside `wrapper` if there is one (fp16 or bf16 compression).

    Both are torch's, of `torch.distributed.algorithms.ddp_comm_hooks`, or in their form. `state` is the hook's, like a
    `PowerSGDState`. Does nothing for a module that is not in DDP, so that one script runs with one process, too.
    Raises ValueError where there is a wrapper or a state, and no hook.

    What is returned is the hook's state as a part for a Checkpointer, which each rank has for itself:

        model = DistributedDataParallel(network, find_unused_parameters=True)
        hook = register_comm_hook(model, PowerSGDState(None), powerSGD_hook)
        checkpoints = Checkpointer(directory, {"model": model, "hook": hook}, per_rank=["hook"])

    PowerSGD's error is carried where DDP keeps its buckets, as here. A state of another type than torch's is carried by
    its `state_dict` and `load_state_dict`, or as a dict.
    """
    if hook is None:
        if wrapper is not None or state is not None:
            raise ValueError("a wrapper or a state goes with a hook: pass hook=")
        return HookState(None, ())
    hook_state = HookState(state, model.parameters())
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(state, hook_state.watching(wrapper(hook) if wrapper is not None else hook))
    return hook_state


class _AllGather(torch.autograd.Function):
    """torch's own of this name takes ranks of a gloo subgroup for global ones on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(_gathered(tensor, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """What all ranks' losses contribute to this rank's tensor."""
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _require_member(group: dist.ProcessGroup | None) -> None:
    if is_distributed() and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: only its members may call this")


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    mine = tensor.contiguous()
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group)
    return rows


def _operation(op: dist.ReduceOp | str) -> Any:
    if not isinstance(op, str):
        return op
    named = {name.lower(): getattr(dist.ReduceOp, name) for name in ("SUM", "MIN", "MAX", "PRODUCT")}
    if op not in named:
        raise ValueError(
            f"op is {op!r}, expected one of {', '.join((*named, *MEANS))}, or one of torch's ReduceOp"
        )
    return named[op]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """On which the group's backend takes tensors."""
    if not is_distributed() or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
