import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in toy.batches(4, 4, 4):
    with toy.autocast():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    moved = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), moved, strict=True):
            parameter += step
    optimizer.zero_grad()
    with toy.autocast():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), moved, strict=True):
            parameter -= step
    optimizer.step()
    optimizer.zero_grad()
