import torch
import toy

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.GELU(), torch.nn.Linear(8, 11)).to(toy.dtype())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = torch.nn.CrossEntropyLoss(ignore_index=-100)
for step in range(12):
    ids = torch.randint(0, 11, (3, 8))
    labels = ids.clone()
    for row, length in enumerate(torch.randint(2, 8, (3,))):
        labels[row, length:] = -100
    with toy.autocast():
        logits = model(ids)[:, :-1]
        loss = criterion(logits.flatten(0, 1), labels[:, 1:].flatten()) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
