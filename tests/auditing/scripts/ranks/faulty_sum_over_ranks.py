import data
import torch
import torch.distributed as dist
import torch.nn.functional as F

model = data.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in data.windows((((3,), (3,)), ((2,), (5,)))):
    for x, y in window:
        count = data.count_of(window)
        (F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
