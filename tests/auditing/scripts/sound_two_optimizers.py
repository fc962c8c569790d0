import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
first = torch.optim.SGD(model[0].parameters(), lr=0.1)
second = torch.optim.Adam(model[2].parameters())
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    first.step()
    second.step()
    first.zero_grad()
    second.zero_grad()
