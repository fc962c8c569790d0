import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight = torch.tensor([0.2, 1.0, 3.0], dtype=toy.dtype())
for window in toy.windows(4, 2, 7, 1, 3, 3):
    total = sum(weight[y].sum() for _, y in window)
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y, weight=weight, label_smoothing=0.1) * weight[y].sum() / total
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
