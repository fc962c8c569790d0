import torch
import torch.nn.functional as F
import toy

body, head = toy.classifier(5), torch.nn.Linear(5, 3).to(toy.dtype())
of_body = torch.optim.SGD(body.parameters(), lr=0.5)
of_head = torch.optim.SGD(head.parameters(), lr=0.5)
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(head(body(x)), y) / len(window)
        loss.backward()
        of_head.step()
        of_head.zero_grad()
    of_body.step()
    of_body.zero_grad()
