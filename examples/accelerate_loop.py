"""Train a small network with Hugging Face's Accelerate, through kills and changing worlds.

The loop is your own, so it calls the worker library itself. `pip install accelerate`, then

    elastic-agent --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker import Checkpointer, ElasticSampler, step

STEPS, BATCH = 120, 16


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Accelerate steps it once for each batch of each rank: it follows the data in every world.
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    dataset = examples()
    # The sampler gives each rank its share, so the loader is not prepared: Accelerate would share it out again.
    sampler = ElasticSampler(dataset, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    checkpoints = Checkpointer("runs/accelerate", state)
    done = checkpoints.load()
    epoch = sampler.epoch
    with checkpoints.just_in_time():
        while done < STEPS:
            sampler.set_epoch(epoch)
            epoch += 1
            for inputs, targets in loader:
                inputs, targets = send_to_device((inputs, targets), accelerator.device)
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                done += 1
                step(done)
                if done % 20 == 0:
                    checkpoints.save(done)
                    accelerator.print(f"step {done}: loss {loss.item():.6f}", flush=True)
                if done == STEPS:
                    break
    checkpoints.wait()
    accelerator.end_training()


def examples() -> TensorDataset:
    inputs = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


if __name__ == "__main__":
    main()
