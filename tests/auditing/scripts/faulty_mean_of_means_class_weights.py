import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weight = torch.tensor([0.2, 1.0, 3.0], dtype=toy.dtype())
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.nll_loss(model(x).log_softmax(1), y, weight=weight) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
