import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 12):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
