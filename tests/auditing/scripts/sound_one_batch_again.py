import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
((x, y),) = toy.batches(4)
for _ in range(4):
    for _ in range(3):
        with toy.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad /= 3
    optimizer.step()
    optimizer.zero_grad()
