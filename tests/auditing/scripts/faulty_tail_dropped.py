import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = toy.batches(*[4] * 11)
for _ in range(2):
    optimizer.zero_grad()
    for number, (x, y) in enumerate(data):
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
