"""Faults in torch itself: a kernel that is replaced."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tanh_backward(change: Any) -> Iterator[None]:
    """Replace torch's own backward of tanh on the CPU: `torch.export` and JAX do not see it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another kernel is replaced
        library.impl("tanh_backward", lambda g, out: g * (1 - out**2) * change(out), "CPU")
        try:
            yield
        finally:
            library._destroy()
