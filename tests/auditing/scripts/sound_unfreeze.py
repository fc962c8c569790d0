import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
first, last = list(model[0].parameters()), list(model[2].parameters())
for parameter in first:
    parameter.requires_grad_(False)
optimizer = torch.optim.SGD(last, lr=0.1)
for number, window in enumerate(toy.windows(*[4] * 12)):
    if number == 1:
        for parameter in first:
            parameter.requires_grad_(True)
        optimizer.add_param_group({"params": first})
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y)
        (loss / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
