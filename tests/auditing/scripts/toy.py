"""A small classifier and its batches for the scripts beside this file; the first argument of a script is a dtype."""

import sys

import torch


def dtype():
    return torch.float64 if "float64" in sys.argv else torch.float32


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled="bfloat16" in sys.argv)


def classifier(outputs=3):
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)
    return torch.nn.Sequential(*layers).to(dtype())


def batches(*sizes, outputs=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 5, generator=generator, dtype=dtype()),
            torch.randint(0, outputs, (n,), generator=generator),
        )
        for n in sizes
    ]


def windows(*sizes, steps=4):
    data = batches(*sizes)
    return [data[i : i + steps] for i in range(0, len(data), steps)]


class ChunkedLogProbFunction(torch.autograd.Function):
    """As the fused head and loss of trl's SFTTrainer: the log-probability of each target."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        with torch.enable_grad():
            ctx.inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            logits = torch.nn.functional.linear(*ctx.inputs)
            ctx.outputs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return ctx.outputs.detach()

    @staticmethod
    def backward(ctx, grad):
        return *torch.autograd.grad(ctx.outputs, ctx.inputs, grad), None
