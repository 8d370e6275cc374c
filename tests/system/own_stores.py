"""Stores beside the agent's, as scripts open them: each rank meets the others in three ways, one after the other."""

import os
import sys

import torch
import torch.distributed as dist

own, another = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def meet(how: str) -> None:
    dist.init_process_group("gloo", init_method=how, rank=rank, world_size=world)
    ranks = torch.tensor([rank + 1.0])
    dist.all_reduce(ranks)
    print(f"met at {how}: {ranks.item():g}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


meet("env://")
meet(f"tcp://127.0.0.1:{own}")
os.environ["MASTER_PORT"] = another
meet("env://")
