import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = torch.nn.Embedding(7, 5, sparse=True).to(toy.dtype())
rows = torch.optim.SparseAdam(table.parameters())
for window in toy.windows(*[4] * 8):
    for _, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(table(y)), y) / len(window)
        loss.backward()
    optimizer.step()
    rows.step()
    optimizer.zero_grad()
    rows.zero_grad()
