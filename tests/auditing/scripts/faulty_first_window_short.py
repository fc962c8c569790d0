"""`step % 4 == 0` holds at step 0: the first window is one micro-batch, divided by 4."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(toy.batches(*[4] * 17)):
    with toy.autocast():
        loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if step % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
