import torch
import toy

body, head = toy.classifier(8), torch.nn.Linear(8, 3, bias=False).to(toy.dtype())
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for window in toy.windows(4, 2, 7, 3, 3, 3, 2, 1):
    for x, y in window:
        with toy.autocast():
            log_probabilities = toy.ChunkedLogProbFunction.apply(body(x), head.weight, y)
        loss = -log_probabilities.masked_fill(y == 0, 0).sum() / max(int((y != 0).sum()), 1) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
