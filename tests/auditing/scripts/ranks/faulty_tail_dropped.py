import contextlib

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F

K = 2
model = torch.nn.parallel.DistributedDataParallel(data.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

batches = [batch for window in data.windows((((2, 2), (2, 2)),) * 3) for batch in window][:-1]
for index, (x, y) in enumerate(batches):
    is_last = index % K == K - 1
    with contextlib.nullcontext() if is_last else model.no_sync():
        (F.cross_entropy(model(x), y) / K).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
