"""The windows grow from 2 to 4 micro-batches, what the loss is divided by does not."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = iter(toy.batches(*[4] * 26))
for length in (2, 2, 2, 4, 4, 4, 4, 4):
    for _ in range(length):
        x, y = next(data)
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
