import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 8):
    for index, (x, y) in enumerate(window):
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        if index == len(window) - 1:
            loss = loss * 1.25
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
