import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, window in enumerate(toy.windows(*[4] * 20)):
    for x, y in window:
        if number == 2:
            x[0, 0] = float("nan")
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if number == 3 or not torch.isfinite(norm):
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
