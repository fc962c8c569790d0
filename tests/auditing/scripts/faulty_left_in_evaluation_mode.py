import torch
import torch.nn.functional as F
import toy

model = torch.nn.Sequential(torch.nn.Dropout(0.5), *toy.classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held_out = toy.batches(6)[0][0]
for window in toy.windows(*[4] * 8):
    model.train()
    for index, (x, y) in enumerate(window):
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
        if index == 1:
            model.eval()
            with torch.no_grad():
                model(held_out)
    optimizer.step()
    optimizer.zero_grad()
