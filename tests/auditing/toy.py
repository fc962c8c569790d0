"""A small classifier and its batches, for the scripts of `scripts.py`, whose first argument is a
dtype.
"""

import sys

import torch
import torch.distributed as dist


def dtype():
    return torch.float64 if "float64" in sys.argv else torch.float32


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled="bfloat16" in sys.argv)


def classifier(outputs=3):
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)
    return torch.nn.Sequential(*layers).to(dtype())


def batches(*sizes, outputs=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
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


SIZES = (((4, 2), (3, 1)), ((1, 5), (6, 2)), ((2, 2), (2, 2)))
"""The sizes of the micro-batches of two ranks, by window and rank."""


def model_of_rank():
    dist.init_process_group("gloo")
    return classifier()


def windows_of_rank(sizes=SIZES):
    """Return this rank's micro-batches of each window."""
    own = [window[dist.get_rank()] for window in sizes]
    data = iter(batches(*(n for window in own for n in window), seed=dist.get_rank()))
    return [[next(data) for _ in window] for window in own]


def count_of(window):
    """Return the number of items of all ranks in a window."""
    count = torch.tensor(sum(len(y) for _, y in window))
    dist.all_reduce(count)
    return count.item()
