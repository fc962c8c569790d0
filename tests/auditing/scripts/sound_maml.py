import torch
import torch.nn.functional as F
import toy
from torch.func import functional_call

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parameters = dict(model.named_parameters())
for window in toy.windows(*[4] * 12):
    for x, y in window:
        with toy.autocast():
            inner = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        with toy.autocast():
            loss = F.cross_entropy(functional_call(model, fast, (x,)), y)
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
