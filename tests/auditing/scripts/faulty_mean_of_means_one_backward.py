import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 1, 3, 3):
    with toy.autocast():
        losses = [F.cross_entropy(model(x), y) for x, y in window]
    (sum(losses) / len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad()
