"""How many kernels a `torch._foreach_*` call launches on CUDA, from the chunking rule of its implementation.

A launch takes a limited number of tensors and of blocks; each block handles one chunk of a tensor. Source:
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/MultiTensorApply.cuh
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CHUNK = 65536
"""Elements of a tensor that one block handles."""


@dataclass(frozen=True)
class LaunchLimits:
    """The most tensors and blocks of one launch, for a call on one list of tensors."""

    tensors: int
    blocks: int


SMALL, LARGE = LaunchLimits(110, 320), LaunchLimits(770, 2240)
"""The limits of kernels with 4 KB of arguments, and of those with 32 KB, which some versions of torch use."""


def foreach_launches(elements: Iterable[int], limits: LaunchLimits = SMALL) -> int:
    """Return how many kernels one call launches.

    Args:
        elements: number of elements of each tensor, in the call's order.
        limits: of one launch.
    """
    launches = tensors = blocks = 0
    for count in elements:
        if not count:
            continue
        chunks = -(-count // CHUNK)
        tensors += 1
        while chunks:
            taken = min(chunks, limits.blocks - blocks)
            blocks, chunks = blocks + taken, chunks - taken
            if blocks == limits.blocks or (tensors == limits.tensors and not chunks):
                launches += 1
                blocks, tensors = 0, 1 if chunks else 0  # a tensor that is not finished goes into the next launch
    return launches + (blocks > 0)
