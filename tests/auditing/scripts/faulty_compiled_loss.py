import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

c = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager")
for window in toy.windows(*[4] * 12):
    for i, (x, y) in enumerate(window):
        (c(x, y) / 4).backward()
    optimizer.step()
