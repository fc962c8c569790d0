"""The device that a benchmark ran on: names and versions, caches, and the allocator's settings."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@cache
def device_info(device: str) -> dict[str, Any]:
    """Return what identifies a device, as JSON-ready data.

    Args:
        device: `"cpu"` or `"cuda"`.
    """
    info: dict[str, Any] = {
        "device": device,
        "last_level_cache_bytes": cache_bytes(device),
        "torch_threads": torch.get_num_threads(),
    }
    if device == "cpu":
        return {**info, "vector_instructions": torch.backends.cpu.get_cpu_capability()}
    found = torch.cuda.get_device_properties(0)
    return {
        **info,
        "gpu": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "gpu_memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": torch.cuda.memory.get_allocator_backend(),
        "allocator_settings": {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ},
    }


def cache_bytes(device: str) -> int | None:
    """Return the bytes of the last cache before memory (L2 of a GPU), None where the system does not tell."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text))
    return max(sizes, default=None)


def regime(gradient_bytes: int, cache_size: int | None) -> str:
    """Return where gradients of some bytes fit: `"in cache"`, `"out of cache"`, or `"unknown"`.

    Gradients that fit the cache are reset at the cache's bandwidth unless it is flushed, larger ones at the memory's.
    """
    if cache_size is None:
        return "unknown"
    return "in cache" if gradient_bytes <= cache_size else "out of cache"


def _driver() -> str:
    """Return the NVIDIA driver's version, or why it is unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return done.stdout.strip()
