import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, window in enumerate(toy.windows(*[6] * 12)):
    for x, y in window:
        y[: 2 + number] = -100
    total = sum((y != -100).sum() + 1 for _, y in window)
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y, reduction="sum") / total
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
