import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model = model.to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 40, steps=4):
    for x, y in window:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()), y)
        (loss / 4).backward()
    optimizer.step()
