"""Messages between processes of the suite, with tensors as numpy arrays.

`pickle` takes a tenth of a millisecond for a tensor, since it goes through the file format of `torch.save`; an array
takes a few microseconds.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch


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
    """Return the message of some bytes, which a process that this program has started, or its parent, has sent."""
    return pickle.loads(data)
