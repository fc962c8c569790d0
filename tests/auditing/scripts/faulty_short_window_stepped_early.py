import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    data = toy.batches(*[4] * 7)
    steps = 4
    for i, (x, y) in enumerate(data):
        due = i + 1 == len(data) or (i + 1) % steps == 0
        if i >= 4:
            steps = 3
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / steps
        loss.backward()
        if due:
            optimizer.step()
            optimizer.zero_grad()
