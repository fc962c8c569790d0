import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 3, 5, 3, 6):
    for x, y in window:
        y[:: len(y) // 2] = -100
    total = sum((y != -100).sum() for _, y in window)
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y, reduction="sum") / total
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
