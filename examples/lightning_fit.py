"""Train a small network with Lightning, through kills and changing worlds. `pip install lightning`, then

elastic-agent --nproc-per-node 2 examples/lightning_fit.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.worker.lightning import ElasticCallback, ElasticEnvironment


class Sines(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        self.log("loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0 and not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["loss"]
            print(f"epoch {self.current_epoch} step {self.global_step}: loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


def examples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def main() -> None:
    environment = ElasticEnvironment()
    seed_everything(0)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=environment.devices,
        num_nodes=environment.num_nodes,
        plugins=[environment],
        callbacks=[ElasticCallback("runs/lightning", save_every=20, memory_every=1)],
        max_steps=120,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(examples(1024, seed=1), batch_size=16, shuffle=True)
    trainer.fit(Sines(), train, DataLoader(examples(256, seed=2), batch_size=64))


if __name__ == "__main__":
    main()
