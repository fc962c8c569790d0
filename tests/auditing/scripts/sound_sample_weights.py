"""Weights of the samples, as in a policy gradient: in a product, in a dot product, and as a function of the loss."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 1, 1, 1, 1, 1):
    count = sum(len(x) for x, _ in window)
    for x, y in window:
        advantage = x[:, 0].float()
        with toy.autocast():
            logits = model(x)
            weighted = F.cross_entropy(logits, y, reduction="none") * advantage / count
            dot = torch.dot(F.nll_loss(logits.float().log_softmax(-1), y, reduction="none"), advantage.exp())
            losses = F.cross_entropy(logits, y, reduction="none")
            focal = (1 - torch.exp(-losses)) ** 2 * losses
        (weighted.sum() + (dot + focal.sum()) / count).backward()
    optimizer.step()
    optimizer.zero_grad()
