"""What the parent and the ranks send each other: requests and outcomes, with tensors as numpy arrays.

`pickle` takes a tenth of a millisecond for a tensor, since it goes through the file format of `torch.save`; an array
takes a few microseconds.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradcheck_suite.execution.ranks.sources import Source
from gradcheck_suite.execution.runner import Outcome
from gradcheck_suite.schema.case import Case


@dataclass(frozen=True)
class Request:
    """What every rank is to run.

    Attributes:
        loop: where the loop is found.
        case: what it trains; its plan has as many ranks as there are.
        problem: where the user's problem is found; None for a generated one.
        quiet: whether to discard what the loop prints.
        path: the parent's `sys.path`.
        scale: factor of the loss.
        item_counts: what each item counts, in place of the case's own counts; None for these.
        count_traffic: whether to count the collectives of the run.
    """

    loop: Source
    case: Case
    problem: Source | None
    quiet: bool
    path: tuple[str, ...]
    scale: float = 1.0
    item_counts: tuple[float, ...] | None = None
    count_traffic: bool = False


@dataclass(frozen=True)
class Reply:
    """What a rank answers.

    Attributes:
        outcome: of the run; None where there is none.
        refused: why the case cannot be run at all, and no loop is to blame; None where it was run.
        cannot_run: whether that is for want of something on this machine.
    """

    outcome: Outcome | None
    refused: str | None = None
    cannot_run: bool = False


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            plain, is_bfloat16 = value.detach().cpu(), value.dtype is torch.bfloat16
            array = (plain.view(torch.int16) if is_bfloat16 else plain).numpy()
            return _tensor, (array, is_bfloat16, value.device.type)
        return NotImplemented


def _tensor(array: Any, is_bfloat16: bool, device: str) -> torch.Tensor:
    # a tensor shares the memory of its array, which a pickled one may not write to
    tensor = torch.from_numpy(np.require(array, requirements="W"))
    return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).to(device)


def packed(message: Any) -> bytes:
    """Return a message as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the message of some bytes, which a rank or the parent of this very program has sent."""
    return pickle.loads(data)
