"""Train a small language model with the Trainer of Hugging Face's transformers, through kills and changing worlds.

The last two words of each line follow from the first two. `pip install 'transformers[torch]'`, then

    elastic-agent --nproc-per-node 2 examples/transformers_trainer.py
"""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from elastic_agent.worker.transformers import ElasticCallback

WORDS = 32


class Sums(Dataset):
    """a, b, a + b, a - b; all modulo WORDS."""

    def __len__(self) -> int:
        return WORDS * WORDS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        a, b = divmod(index, WORDS)
        line = torch.tensor([a, b, (a + b) % WORDS, (a - b) % WORDS])
        return {"input_ids": line, "labels": line}


def main() -> None:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    on_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir="runs/transformers/output",
        max_steps=120,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        use_cpu=not on_gpu,
        ddp_backend="nccl" if on_gpu else "gloo",
        logging_steps=20,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    torch.manual_seed(0)
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Sums())
    trainer.add_callback(ElasticCallback(trainer, "runs/transformers", save_every=20, memory_every=1))
    trainer.train()


if __name__ == "__main__":
    main()
