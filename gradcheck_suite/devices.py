"""Dtypes and devices by name, and what this machine can run."""

from __future__ import annotations

import torch

from gradcheck_suite.case import DEVICES, DTYPES
from gradcheck_suite.errors import CannotRunHere, UsageError


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a case's dtype name."""
    if name not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def checked_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        UsageError: there is no device of that name.
        CannotRunHere: CUDA was asked for where there is none.
    """
    if name not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}; got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise CannotRunHere(
            f"device 'cuda' was asked for, but torch {torch.__version__} sees no CUDA device here: "
            "use --device cpu, or a machine with a GPU and a CUDA build of torch"
        )
    return torch.device(name)
