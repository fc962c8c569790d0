"""A causal language model trained by the recipe of Accelerate's guide for samples of variable size."""

import argparse
import contextlib

import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--as-printed", action="store_true", help="count the first label of each row, too")
args = parser.parse_args()

steps = 4
accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
transformers.set_seed(0)
config = transformers.LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randint(3, 40, (int(length),)) for length in torch.randint(3, 12, (24,))]


def collate(batch):
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in batch], batch_first=True)
    ids, labels = (pad(batch, batch_first=True, padding_value=value) for value in (0, -100))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, collate_fn=collate))
criterion = torch.nn.CrossEntropyLoss(reduction="sum")
batches = list(loader)
for start in range(0, len(batches), steps):
    window = batches[start : start + steps]
    labels = [batch["labels"] if args.as_printed else batch["labels"][..., 1:] for batch in window]
    count = accelerator.gather(sum(label.ne(-100).sum() for label in labels)).sum().item()
    for index, batch in enumerate(window):
        waits = index < len(window) - 1 and accelerator.num_processes > 1
        with model.no_sync() if waits else contextlib.nullcontext():
            targets = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            loss = criterion(logits.flatten(0, 1), targets.flatten())
            accelerator.backward(loss * steps * accelerator.num_processes / count)
    optimizer.step()
    optimizer.zero_grad()
