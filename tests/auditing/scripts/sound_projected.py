"""Gradients of two losses, reset in between, of which one is projected where they conflict (PCGrad)."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier(outputs=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in toy.batches(*[4] * 12):
    with toy.autocast():
        out = model(x)
        losses = F.cross_entropy(out[:, :3], y), F.mse_loss(out[:, 3], x.sum(1))
    gradients = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    conflict = sum((a * b).sum() for a, b in zip(*gradients, strict=True))
    share = conflict.clamp(max=0) / sum((b * b).sum() for b in gradients[1])
    for parameter, a, b in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = a + (1 - share) * b
    optimizer.step()
