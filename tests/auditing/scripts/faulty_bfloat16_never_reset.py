import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model = model.to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 40, steps=8):
    for x, y in window:
        loss = F.cross_entropy(model(x.bfloat16()), y)
        (loss / 8).backward()
    optimizer.step()
