import torch
import torch.nn.functional as F
import toy
from torch.utils.checkpoint import checkpoint

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for reentrant in (False, True):
    for window in toy.windows(*[4] * 8):
        for x, y in window:
            with toy.autocast():
                x.requires_grad_()
                loss = checkpoint(lambda x, y: F.cross_entropy(model(x), y), x, y, use_reentrant=reentrant)
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
