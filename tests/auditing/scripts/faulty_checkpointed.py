import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
from torch.utils.checkpoint import checkpoint

for reentrant in (False, True):
    for window in toy.windows(4, 2, 7, 1):
        for x, y in window:
            with toy.autocast():
                x.requires_grad_()
                loss = checkpoint(lambda x, y: F.cross_entropy(model(x), y), x, y, use_reentrant=reentrant)
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
