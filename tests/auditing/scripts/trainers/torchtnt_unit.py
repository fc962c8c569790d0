"""A classifier trained by torchtnt's AutoUnit with `gradient_accumulation_steps`."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.train import train

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=8)
args = parser.parse_args()


class Unit(AutoUnit):
    def compute_loss(self, state, data):
        x, y = data
        outputs = self.module(x)
        return torch.nn.functional.cross_entropy(outputs, y), outputs

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
rows = 4 * args.batches
loader = DataLoader(TensorDataset(torch.randn(rows, 6), torch.randint(0, 3, (rows,))), batch_size=4)
unit = Unit(module=model, device=torch.device("cpu"), gradient_accumulation_steps=4)
train(unit, loader, max_epochs=2)
