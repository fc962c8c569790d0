"""Gradients are summed by hand, each times the share of its micro-batch in the window."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 6, 2, 4, 3, 3, 5, 5, 7, 2, 4, 3):
    items = sum(len(y) for _, y in window)
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in window:
        optimizer.zero_grad()
        with toy.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += parameter.grad * (len(y) / items)
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = total
    optimizer.step()
