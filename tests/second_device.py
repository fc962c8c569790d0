"""A second device without hardware: its tensors compute on the CPU, and refuse to meet tensors of
the CPU.

It stands in for CUDA as far as tensors go: a tensor that is left on the wrong device raises here as
it would on a GPU. A tensor of this device wraps a CPU tensor and reports the device `meta`, since
autograd looks for the hardware of any other. Kernels, streams, memory and rounding are those of the
CPU.

    python -m pytest properties -m cuda -p tests.second_device

rehearses what runs on a GPU. Autocast changes nothing on this device: loops that use it run in full
precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from gradcheck_suite.run import instance
from gradcheck_suite.run.instance import Instance

DEVICE = torch.device("meta", 0)
_BETWEEN_DEVICES = frozenset({"copy_", "_to_copy"})


class SecondDeviceTensor(torch.Tensor):
    """A tensor of the second device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SecondDeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=None if inner.is_sparse else inner.stride(),
            storage_offset=None if inner.is_sparse else inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{self.inner!r} on the second device"

    def __format__(self, spec: str) -> str:
        return format(self.inner, spec)

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        """Return the values."""
        return self.inner.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values."""
        return self.inner.untyped_storage()

    # a module that changes dtype or device exchanges tensors with these methods for new ones
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: None, size: Any, strides: Any) -> SecondDeviceTensor:
        return SecondDeviceTensor(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sends operations that make a tensor on the second device there: none of their arguments is a
    tensor of it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = (
            kwargs.get("device") is not None and torch.device(kwargs["device"]).type == DEVICE.type
        )
        return _run(func, args, kwargs) if there else func(*args, **kwargs)


class _ByName(TorchFunctionMode):
    """Moves to the second device what is sent to `cuda`, and makes tensors of Python numbers on the
    CPU first.

    Torch would make those without a call that a mode sees.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and args[1:] == ("cuda",):
            args = (args[0], DEVICE)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            del kwargs["device"]
            return func(*args, **kwargs).to(DEVICE)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    mine = [tensor for tensor in given if isinstance(tensor, SecondDeviceTensor)]
    others = [
        tensor for tensor in given if not isinstance(tensor, SecondDeviceTensor) and tensor.ndim
    ]
    if mine and others and name not in _BETWEEN_DEVICES:
        raise RuntimeError(f"Expected all tensors to be on the same device, found two ({func})")
    there = bool(mine)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "copy_":
        there = isinstance(args[0], SecondDeviceTensor)
    known = {id(tensor.inner): tensor for tensor in mine}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)
    return tree_map(
        lambda value: (
            known[id(value)] if id(value) in known else _wrapped(value) if there else value
        ),
        out,
    )


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, SecondDeviceTensor) else value


def _wrapped(value: Any) -> Any:
    return SecondDeviceTensor(value) if isinstance(value, torch.Tensor) else value


@contextmanager
def second_device() -> Iterator[None]:
    """Let cases on the device `cuda` run on the second device."""
    with pytest.MonkeyPatch.context() as patch, _Factories(), _ByName():
        patch.setattr(
            instance,
            "checked_device",
            lambda name: DEVICE if name == "cuda" else torch.device(name),
        )
        patch.setattr(
            Instance,
            "device",
            property(lambda self: DEVICE if self.case.device == "cuda" else torch.device("cpu")),
        )
        # torch knows no autocast for this device
        is_enabled, autocast = torch.is_autocast_enabled, torch.autocast
        patch.setattr(
            torch,
            "autocast",
            lambda device, **about: (
                nullcontext() if device == DEVICE.type else autocast(device, **about)
            ),
        )
        patch.setattr(
            torch,
            "is_autocast_enabled",
            lambda device="cpu": device != DEVICE.type and is_enabled(device),
        )
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what would be skipped for want of a GPU."""
    for item in items:
        if _on_cuda(item):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skipif"]


def _on_cuda(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("device") == "cuda"


@pytest.fixture(autouse=True)
def _on_the_second_device(request: pytest.FixtureRequest) -> Iterator[None]:
    with second_device() if _on_cuda(request.node) else nullcontext():
        yield
