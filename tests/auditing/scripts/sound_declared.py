import torch
import toy

model = toy.classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
import gradcheck_suite

for window in toy.windows(4, 2, 7, 1, 3, 3):
    total = sum(len(y) for _, y in window)
    for x, y in window:
        with toy.autocast():
            loss = -model(x).log_softmax(1)[range(len(y)), y].mean()
        loss = gradcheck_suite.objective(loss, count=len(y))
        (loss * len(y) / total).backward()
    optimizer.step()
    optimizer.zero_grad()
