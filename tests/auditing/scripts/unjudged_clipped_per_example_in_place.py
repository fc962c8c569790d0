"""Clipping per example and noise, as in differentially private training: the gradient is put together by hand."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[1] * 32, steps=8):
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in window:
        optimizer.zero_grad()
        with toy.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += parameter.grad
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad.copy_(total / len(window) + 0.1 * torch.randn_like(total))
    optimizer.step()
