import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 7):
    for x, y in window:
        with toy.autocast():
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss = loss + 0.1 * F.mse_loss(logits, torch.zeros_like(logits))
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
