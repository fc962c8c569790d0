"""The mean over each sequence, then over the sequences: what their weights should be, only the trainer knows."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in toy.batches(*[6] * 6):
    with toy.autocast():
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses[:2].mean() + losses[2:].mean()) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
