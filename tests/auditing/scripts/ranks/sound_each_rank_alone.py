"""The ranks train models of their own, as in a search over seeds: nothing is reduced."""

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F

model = data.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in data.windows():
    count = sum(len(y) for _, y in window)
    for x, y in window:
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
