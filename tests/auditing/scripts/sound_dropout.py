"""Random layers, a custom function with a gradient of its own, and modules that count and collect."""

import random

import numpy as np
import torch
import torch.nn.functional as F
import toy


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = toy.classifier(8), torch.nn.Linear(8, 3).to(toy.dtype())
        self.norm = torch.nn.BatchNorm1d(8).to(toy.dtype())
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        hidden = Rounded.apply(4 * self.body(x)) + self.norm(self.body(x))
        if random.random() < 0.5 and np.random.rand() < 0.9:
            hidden = F.dropout(hidden, 0.3, self.training)
        return self.head(hidden)


random.seed(0)
np.random.seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert (model.calls, model.seen) == (8, [4] * 8)
