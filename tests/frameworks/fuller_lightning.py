"""The example for Lightning with more of what a Trainer can do. Not a test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_fit import Sines, examples
from torch.utils.data import DataLoader

from elastic_agent.worker.lightning import ElasticCallback, ElasticEnvironment


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(examples(1000, seed=1), batch_size=16, shuffle=True, num_workers=1)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(examples(256, seed=2), batch_size=64)


environment = ElasticEnvironment()
seed_everything(0)
stopping = EarlyStopping("loss", patience=5)
best = ModelCheckpoint("best", monitor="loss", save_top_k=2)
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=environment.devices,
    num_nodes=environment.num_nodes,
    plugins=[environment],
    callbacks=[stopping, best, ElasticCallback("checkpoints", memory_every=1)],
    max_epochs=8,
    accumulate_grad_batches=3,
    gradient_clip_val=1.0,
    val_check_interval=0.5,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Sines()
trainer.fit(module, datamodule=Data())
if trainer.global_rank == 0:
    total = sum(weights.double().sum().item() for weights in module.parameters())
    found = (
        total,
        trainer.global_step,
        trainer.current_epoch,
        Path(best.best_model_path).name,
        float(best.best_model_score),
        stopping.wait_count,
    )
    print(f"the end: {found!r}", flush=True)
