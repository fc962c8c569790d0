import os
import signal

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F

model = torch.nn.parallel.DistributedDataParallel(data.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, window in enumerate(data.windows()):
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    count = data.count_of(window)
    for x, y in window:
        with model.no_sync():
            (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
