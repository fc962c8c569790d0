"""Each micro-batch's weighted mean divides by the weights of its own samples."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 8):
    for x, y in window:
        weights = x[:, 0].exp().float()
        with toy.autocast():
            losses = F.cross_entropy(model(x), y, reduction="none").float()
        ((losses * weights).sum() / weights.sum() / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
