import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, window in enumerate(toy.windows(*[4] * 16)):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    model[0].requires_grad_(i != 1)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = None  # the gradient that a frozen parameter has is left, and is there when it is thawed
