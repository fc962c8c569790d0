"""Samples of operations from torch's own tests."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]


@cache
def op_infos() -> dict[str, list[Any]]:
    """Return torch's descriptions of operations, by the name of the ATen operation and by their own
    full name.
    """
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            # torch's test utilities subclass its TestCase, and nothing here uses that
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    # torch's test utilities forbid setting precision flags from then on, to every other test of
    # this process
    with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags"):
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found: dict[str, list[Any]] = {}
    for info in op_db:
        for name in {info.aten_name or info.name, info.name.split(".")[-1], info.full_name}:
            found.setdefault(name, []).append(info)
    return found


def _inputs(info: Any, *, requires_grad: bool, count: int) -> list[Any]:
    dtype = torch.float64 if torch.float64 in info.dtypes else torch.int64
    if dtype not in info.dtypes:
        return []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as seeding:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        # torch's samples seed before each: `torch.manual_seed` formats a traceback for each other
        # device
        seeding.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        samples = list(
            info.sample_inputs("cpu", dtype, requires_grad=requires_grad and dtype is torch.float64)
        )
    return samples[:: max(1, len(samples) // count)][:count]


def direct(name: str, count: int) -> Iterator[Sample]:
    """Yield calls of `torch.ops.aten.<name>`, its overload resolved, with inputs that require
    gradients.
    """
    packet = getattr(torch.ops.aten, name)
    for info in op_infos().get(name, []):
        for sample in _inputs(info, requires_grad=True, count=count):
            args = (sample.input, *sample.args)
            try:
                overload = torch._C._jit_resolve_packet(
                    packet._qualified_op_name, *args, **sample.kwargs
                )
            except RuntimeError:
                continue  # the Python function's arguments are not the operation's
            yield getattr(packet, overload or "default"), args, dict(sample.kwargs)


class _Recorder(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func._schema.name == f"aten::{self.name}":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(name: str, through: str, count: int) -> Iterator[Sample]:
    """Yield the calls of `aten.<name>` that a function of torch makes, all floating inputs
    requiring gradients.
    """
    for info in op_infos().get(through, []):
        for sample in _inputs(info, requires_grad=False, count=count):
            recorder = _Recorder(name)
            with recorder, torch.no_grad():
                info.op(sample.input, *sample.args, **sample.kwargs)
            for func, args, kwargs in recorder.calls[:2]:
                yield func, torch.utils._pytree.tree_map(_requiring, args), kwargs


def _requiring(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().clone().requires_grad_()
    return x
