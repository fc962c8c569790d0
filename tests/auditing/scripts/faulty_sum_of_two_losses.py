import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 16):
    for x, y in window:
        with toy.autocast():
            first = F.cross_entropy(model(x), y)
            second = F.cross_entropy(model(-x), y.flip(0))
            loss = (first + second) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
