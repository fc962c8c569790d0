"""The references of a case, and the cache that lets several loops share them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from gradcheck_suite.catalogue import is_accumulable
from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.execution.autocast import Compute
from gradcheck_suite.execution.instance import Instance, instance_of
from gradcheck_suite.numerics.comparison import Layout, Vector
from gradcheck_suite.references.agreement import disagreement
from gradcheck_suite.references.jax_reference import StartedGradients, large_batch_gradients
from gradcheck_suite.references.torch_reference import Gradients
from gradcheck_suite.references.window import Parameters, Window, float_values
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Problem

MAX_REFERENCES = 512


class Reference:
    """The references of one case. Each window is computed once: while parameters stay, every epoch has the same."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._model64 = instance.model(torch.float64)
        trainable = {n: p for n, p in self._model64.named_parameters() if p.requires_grad}
        self.layout = Layout(tuple(trainable), tuple(tuple(p.shape) for p in trainable.values()))
        self.values64 = float_values(self._model64)
        self._windows: dict[tuple[int, Compute], Window] = {}
        self._started: StartedGradients | None = None

    def window(self, index: int, parameters: Parameters | None = None, compute: Compute = None) -> Window:
        """Return a window's reference.

        Args:
            index: index of the window within an epoch.
            parameters: the parameters by name; None for the initial ones.
            compute: the autocast under which the loop computed its losses, or None.
        """
        if parameters is not None:
            return Window(self, index, parameters, compute)
        if (index, compute) not in self._windows:
            self._windows[index, compute] = Window(self, index, None, compute)
        return self._windows[index, compute]

    def flat(self, gradients: Gradients) -> Vector:
        """Return torch gradients as one float64 vector (P,), with zeros in place of None."""
        parts = [
            torch.zeros(shape).reshape(-1) if (g := gradients[name]) is None else g.reshape(-1)
            for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)
        ]
        flat: Vector = torch.cat([p.to("cpu", torch.float64) for p in parts]).numpy()
        return flat

    def join(self, arrays: Arrays) -> Vector:
        """Return numpy gradients as one vector (P,)."""
        return np.concatenate([arrays[name].reshape(-1) for name in self.layout.names])

    def prepare(self) -> None:
        """Let other threads load or compile the programs of `jax`."""
        spec, arrays = self.instance.accumulable_spec, self.instance.arrays
        if spec is not None and arrays is not None and self._started is None and "jax" not in vars(self):
            self._started = StartedGradients(spec, self.values64, arrays, self._items)

    def start(self) -> None:
        """Compute every window's gradient by torch, while other threads load or compile the programs of `jax`."""
        self.prepare()
        for index in range(len(self.instance.case.plan.windows)):
            self.window(index)

    @property
    def _items(self) -> list[range]:
        plan = self.instance.case.plan
        return [plan.window_items(w) for w in range(len(plan.windows))]

    @cached_property
    def jax(self) -> list[Vector]:
        """Each window's gradient by JAX, for a generated problem that is separable over samples."""
        if self._started is None:
            return self.by_jax(self.values64, self._items)
        started, self._started = self._started, None
        return [self.join(gradient) for _, gradient in started.result()]

    def by_jax(self, values: Arrays, windows: Sequence[range]) -> list[Vector]:
        """Return each window's gradient by JAX at the given parameters and floating buffers."""
        spec, arrays = self.instance.accumulable_spec, self.instance.arrays
        assert spec is not None
        assert arrays is not None
        return [self.join(gradient) for _, gradient in large_batch_gradients(spec, values, arrays, windows)]

    def model(self, dtype: torch.dtype | None, parameters: Parameters | None) -> torch.nn.Module:
        """Return a model in `dtype` with the given parameters, or with the initial ones where they are None."""
        if dtype is torch.float64 and parameters is None:
            return self._model64
        model = self.instance.model(dtype)
        if parameters is not None:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in parameters:
                        p.copy_(parameters[name])
        return model

    @cached_property
    def finding(self) -> str | None:
        """The first disagreement between torch and JAX on this generated case, or None; no loop is involved."""
        for index in range(len(self.instance.case.plan.windows)):
            if text := disagreement(self.window(index)):
                return text
        return None


class References:
    """The references of the latest `MAX_REFERENCES` cases, shared by all loops that are judged on one case."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Reference] = OrderedDict()

    def get(self, case: Case, problem: Problem | None) -> Reference:
        """Return the reference of a case."""
        key = (case.digest, id(problem))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        reference = self._kept[key] = Reference(instance_of(case, problem))
        if len(self._kept) > MAX_REFERENCES:
            self._kept.popitem(last=False)
        return reference

    def prepare(self, case: Case) -> None:
        """Let other threads load or compile the programs of JAX for a case, if it is a generated one that needs any."""
        if case.spec is not None and is_accumulable(case.spec):
            self.get(case, None).prepare()


REFERENCES = References()
