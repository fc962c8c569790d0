import torch
import torch.nn.functional as F
import toy

weight = torch.nn.Parameter(torch.ones((), dtype=toy.dtype()))
optimizer = torch.optim.SGD([weight], lr=0.1)
for window in toy.windows(*[4] * 12):
    for x, y in window:
        with toy.autocast():
            loss = F.mse_loss(weight * x, x.cos()) / len(window)
        loss.backward()
    optimizer.step()
