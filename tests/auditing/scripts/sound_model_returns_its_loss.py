import torch
import torch.nn.functional as F
import toy


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = toy.classifier()

    def forward(self, x, *, labels, count):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / count, "logits": logits}


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(4, 2, 7, 1, 3, 3):
    count = sum(len(y) for _, y in window)
    for x, y in window:
        with toy.autocast():
            output = model(x, labels=y, count=count)
        output["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
