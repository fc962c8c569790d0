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
