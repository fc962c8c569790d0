import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []
mask = torch.ones(8, 1, dtype=toy.dtype())
mask[0] = 0
model[0].weight.register_hook(lambda gradient: gradient * mask)
model[2].weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
