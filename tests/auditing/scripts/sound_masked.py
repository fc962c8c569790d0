import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 3, 5, 3, 6):
    masks = [torch.arange(len(y)) % 2 == 0 for _, y in window]
    total = sum(mask.sum() for mask in masks)
    for (x, y), mask in zip(window, masks, strict=True):
        with toy.autocast():
            loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / total
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
