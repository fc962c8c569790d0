import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 12):
    running = 0.0
    for x, y in window:
        with toy.autocast():
            running = running + F.cross_entropy(model(x), y) / len(window)
        running.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
