"""Each micro-batch's mean of weighted losses divides by its own samples."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 1, 3, 3):
    for x, y in window:
        with toy.autocast():
            losses = F.cross_entropy(model(x), y, reduction="none") * x[:, 0]
        (losses.mean() / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
