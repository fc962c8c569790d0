"""How many kernels a fill and a `torch._foreach_*` call launch on CUDA, from the rules of their implementations.

A launch of a foreach call takes a limited number of tensors and of blocks; each block handles one chunk of a tensor.
Source: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/MultiTensorApply.cuh
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


INDEXED = 2**31 - 1
"""The largest byte offset in a tensor that one kernel over its elements handles."""


def fill_launches(elements: int, itemsize: int) -> int:
    """Return how many kernels fill one contiguous tensor, which is halved until byte offsets fit 32 bits.

    Source: `gpu_kernel` in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Loops.cuh and
    `can_use_32bit_indexing` in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/TensorIterator.cpp

    Args:
        elements: number of elements.
        itemsize: bytes of an element.
    """
    if not elements:
        return 0
    if 1 + (elements - 1) * itemsize <= INDEXED:
        return 1
    return fill_launches(elements // 2, itemsize) + fill_launches(elements - elements // 2, itemsize)


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
