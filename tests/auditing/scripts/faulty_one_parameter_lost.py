import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 12):
    for number, (x, y) in enumerate(window):
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
        if number == 1:
            model[0].bias.grad = None
    optimizer.step()
    optimizer.zero_grad()
