"""Custom functions: a product, rounded weights with a straight-through gradient, a gradient that is reversed."""

import torch
import torch.nn.functional as F
import toy


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        return gradient @ weight, gradient.T @ x


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        scale = weight.abs().mean()
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = toy.classifier(8), torch.nn.Linear(8, 3, bias=False).to(toy.dtype())

    def forward(self, x):
        return Product.apply(Reversed.apply(self.body(x)).to(self.head.weight), Rounded.apply(self.head.weight))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
