import data
import torch
import torch.distributed as dist
import torch.nn.functional as F

model = data.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in data.windows():
    for x, y in window:
        F.cross_entropy(model(x), y, reduction="sum").backward()
    count = data.count_of(window)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= count
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
