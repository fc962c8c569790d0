"""The model, and each rank's micro-batches, for the scripts beside this file; run them with torchrun."""

import sys

import torch
import torch.distributed as dist

SIZES = (((4, 2), (3, 1)), ((1, 5), (6, 2)), ((2, 2), (2, 2)))
"""The sizes of the micro-batches, by window and rank."""


def model():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers).to(torch.float64 if "float64" in sys.argv else torch.float32)


def windows(sizes=SIZES):
    """Yield this rank's micro-batches of each window."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    dtype = torch.float64 if "float64" in sys.argv else torch.float32
    for window in sizes:
        yield [
            (torch.randn(n, 5, generator=generator, dtype=dtype), torch.randint(0, 3, (n,), generator=generator))
            for n in window[rank]
        ]


def count_of(window):
    """Return the number of items of all ranks in a window."""
    count = torch.tensor(sum(len(y) for _, y in window))
    dist.all_reduce(count)
    return count.item()
