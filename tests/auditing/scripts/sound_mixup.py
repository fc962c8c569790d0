"""Mixup: each loss has a weight that changes with every batch, and both together weigh 1."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(2)
for window in toy.windows(*[4] * 12):
    for x, y in window:
        share, order = float(torch.rand(())), torch.randperm(len(x))
        with toy.autocast():
            mixed = model(share * x + (1 - share) * x[order])
            loss = share * F.cross_entropy(mixed, y) + (1 - share) * F.cross_entropy(mixed, y[order])
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
