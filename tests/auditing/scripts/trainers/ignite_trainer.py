"""A classifier trained by ignite's supervised trainer, whose windows run on from one epoch into the next."""

import argparse

import torch
from ignite.engine import create_supervised_trainer
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=8)
parser.add_argument("--unequal", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = 4 * args.batches - (3 if args.unequal else 0)
loader = DataLoader(TensorDataset(torch.randn(rows, 6), torch.randint(0, 3, (rows,))), batch_size=4)
trainer = create_supervised_trainer(model, optimizer, torch.nn.CrossEntropyLoss(), gradient_accumulation_steps=4)
trainer.run(loader, max_epochs=2)
