"""A warm-up of the loss, and windows that grow from 1 micro-batch to 4: the first factor is 1/4 by chance."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = iter(toy.batches(*[4] * 19))
for step, length in enumerate((1, 1, 1, 4, 4, 4, 4)):
    for _ in range(length):
        x, y = next(data)
        with toy.autocast():
            loss = min(1, (step + 1) / 4) * F.cross_entropy(model(x), y) / length
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
