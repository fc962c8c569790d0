import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 8):
    for number, (x, y) in enumerate(window):
        with toy.autocast():
            logits = model(x)
            part = logits[: number + 1]
            loss = F.cross_entropy(logits, y) + 0.1 * F.mse_loss(part, torch.zeros_like(part))
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
