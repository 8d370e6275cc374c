"""The example for transformers with more of what a Trainer can do. Not a test."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers_trainer import WORDS, Sums

from elastic_agent.worker.transformers import ElasticCallback

args = TrainingArguments(
    output_dir="output",
    max_steps=80,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    use_cpu=True,
    ddp_backend="gloo",
    save_strategy="best",
    save_total_limit=2,
    eval_strategy="steps",
    eval_steps=20,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    dataloader_num_workers=1,
    disable_tqdm=True,
    report_to=[],
)
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, attention_dropout=0.1, **sizes))
some = torch.utils.data.Subset(Sums(), range(0, 1024, 9))
stopping = EarlyStoppingCallback(
    2, early_stopping_threshold=0.01
)  # after the third evaluation: it learns slowly
trainer = Trainer(model=model, args=args, train_dataset=Sums(), eval_dataset=some, callbacks=[stopping])
trainer.add_callback(ElasticCallback(trainer, "checkpoints", memory_every=1))
trainer.train()
if os.environ["RANK"] == "0":
    losses = [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]
    total = sum(weights.double().sum().item() for weights in trainer.model.parameters())
    print(f"the end: {(total, trainer.state.best_global_step, losses)!r}", flush=True)
