import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 3, 5, 3, 6):
    for x, y in window:
        mask = torch.arange(len(y)) % 2 == 0
        with toy.autocast():
            loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum()
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
