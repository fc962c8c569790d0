"""Sequences of unequal lengths trained with Lightning's Fabric: the loop counts the targets of all processes itself."""

import argparse
import os

import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--own-count", action="store_true", help="divide by the targets of this process alone")
args = parser.parse_args()

fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
rows = [torch.randint(0, 20, (int(length),)) for length in torch.randint(2, 12, (32,))]


def collate(batch):
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return ids, torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)


loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=2, collate_fn=collate))
for _ in range(2):
    batches = list(loader)
    for start in range(0, len(batches), 3):
        window = batches[start : start + 3]
        count = sum((labels[:, 1:] != -100).sum() for _, labels in window)
        if not args.own_count:
            count = fabric.all_reduce(count, reduce_op="sum") / fabric.world_size
        for index, (ids, labels) in enumerate(window):
            with fabric.no_backward_sync(model, enabled=index < len(window) - 1):
                logits = model(ids)[:, :-1].flatten(0, 1)
                loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
                fabric.backward(loss / count)
        optimizer.step()
        optimizer.zero_grad()
