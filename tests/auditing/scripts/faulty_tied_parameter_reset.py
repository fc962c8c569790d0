import torch
import torch.nn.functional as F
import toy

model = toy.classifier(5)
model[0].weight.requires_grad_(False)
tied = torch.nn.Linear(5, 8, bias=False).to(toy.dtype())
model[2].weight = torch.nn.Parameter(tied.weight.detach().T.clone())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for window in toy.windows(*[4] * 8):
    for x, y in window:
        model[2].weight.grad = None  # as a buffer of the tied parameters that is written and not added to
        with toy.autocast():
            hidden = torch.tanh(model[0](x))
            loss = F.cross_entropy(hidden @ model[2].weight.T + model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
