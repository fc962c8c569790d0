"""Image classification as timm's train.py does it: smoothed labels, an exponential average, its short last window.

The loop follows timm's train.py since its commit df81d8d8, in other words. With `--repaired` the last window changes
what the loss is divided by, but not when a step is due.
"""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=7)
parser.add_argument("--grad-accum-steps", type=int, default=4)
parser.add_argument("--repaired", action="store_true")
args = parser.parse_args()


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
)
model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
train_loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
loader = [(torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))) for _ in range(args.batches)]


def train_one_epoch():
    divisor = modulus = args.grad_accum_steps
    last_window = len(loader) % divisor
    short_from = len(loader) - last_window
    model.train()
    optimizer.zero_grad()
    for batch_idx, (images, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % modulus == 0
        if batch_idx >= short_from:
            divisor = last_window
            if not args.repaired:
                modulus = last_window
        loss = train_loss_fn(model(images), target) / divisor
        loss.backward()
        if not need_update:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update_parameters(model)


for _ in range(2):
    train_one_epoch()
