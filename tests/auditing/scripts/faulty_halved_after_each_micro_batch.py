"""A hook halves the gradient of one parameter after each micro-batch, and with it what is accumulated already."""

import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def halve(parameter):
    with torch.no_grad():
        parameter.grad *= 0.5


model[0].weight.register_post_accumulate_grad_hook(halve)
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
