"""The coefficient of a second loss grows from micro-batch to micro-batch, as an annealed divergence does."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier(outputs=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(toy.batches(*[4] * 12)):
    with toy.autocast():
        out = model(x)
        loss = F.cross_entropy(out[:, :3], y) + min(1, step / 10) * F.mse_loss(out[:, 3], x.sum(1))
    (loss / 2).backward()
    if step % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
