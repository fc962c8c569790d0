import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[6] * 4):
    for number, (x, y) in enumerate(window):
        y[: number + 1] = -100
        with toy.autocast():
            loss = F.cross_entropy(model(x), y)
        (loss / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
