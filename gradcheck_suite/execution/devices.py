"""Dtypes and devices by name, and what this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.schema.case import DEVICES, DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a case's dtype name."""
    if name not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations in one thread: those of a generated model are too small for several.

    With two threads on two busy cores the same cases took nine times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed the random states of the CPU and of a device, and restore them afterwards.

    Args:
        seed: the seed; None leaves the states as they are at the start.
        device: the device.
    """
    # torch.manual_seed would queue a call for every kind of device, each with a formatted stack
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                torch.cuda.manual_seed(seed)
        yield


def checked_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        UsageError: no device has this name.
        CannotRunHere: the device is CUDA, and torch sees none.
    """
    if name not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}; got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise CannotRunHere(
            f"device 'cuda' was asked for, but torch {torch.__version__} sees no CUDA device here: "
            "use --device cpu, or a machine with a GPU and a CUDA build of torch"
        )
    return torch.device(name)
