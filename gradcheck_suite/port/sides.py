"""Both sides of a pair at one state and at several inputs: their programs, runs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np
import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.jax_program import (
    EquationResult,
    JaxProgram,
    JaxRun,
    in_float64,
)
from gradcheck_suite.port.mapping import StateMap
from gradcheck_suite.port.matching import array
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.outputs import OutputPairs
from gradcheck_suite.port.pair import (
    JaxModel,
    Port,
    call_user_code,
    set_state,
)
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.torch_program import TorchProgram, TorchRun


@dataclass
class Point:
    """One input of both sides.

    Attributes:
        inputs: arrays.
        targets: arrays of the loss.
        words: what the inputs are, where they are not the given ones.
        kept: what `Sides` has computed there, by the name of the method.
    """

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    words: tuple[str, ...] = ()
    kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes and dtypes, which programs are compiled for."""
        return tuple(
            (np.shape(x), str(getattr(x, "dtype", type(x)))) for x in (*self.inputs, *self.targets)
        )


_ONE_EXAMPLE = (
    "an Equinox model usually takes one example: give apply=lambda model, *x: jax.vmap(model)(*x)"
    " and params=model"
)
Forward = tuple[list[Array], float, list[EquationResult]]
Value = TypeVar("Value")


def once(compute: Callable[[Any, Point], Value]) -> Callable[[Any, Point], Value]:
    """Keep what a method of the sides, or a function of them, returns at a point for as long as
    there is the point.
    """

    def kept(sides: Any, point: Point) -> Value:
        if compute.__name__ not in point.kept:
            point.kept[compute.__name__] = compute(sides, point)
        found: Value = point.kept[compute.__name__]
        return found

    return wraps(compute)(kept)


class Sides:
    """A pair at one state.

    Attributes:
        state: of the torch module, away from its initial one.
        leaves: of the JAX parameters.
        given: the inputs that the author gave.
        points: these and others.
        outputs: which of the port's is compared with each of torch's.
    """

    def __init__(self, pair: Port, model: JaxModel, state_map: StateMap, seed: int) -> None:
        self.pair = pair
        self.model = model
        self.map = state_map
        self.given = Point(pair.inputs, pair.targets)
        self.points = [self.given]
        self._jax: dict[Any, JaxProgram] = {}
        self.outputs = OutputPairs(pair)
        if state_map.moves_buffers and not self._is_moved(seed, 1.0):
            state_map.keep_buffers()
        if not any(self._is_moved(seed, much) for much in (1.0, 0.1, 0.0)):
            self._is_moved(seed, 1.0)
        self._expect_outputs()

    def _is_moved(self, seed: int, much: float) -> bool:
        """Take a state away from the initial one.

        Return whether torch's outputs there are numbers.
        """
        self.state, self.leaves = self.map.moved(seed, much)
        self._other = seed + 1, much
        set_state(self.pair.module, self.state)
        self.given.kept.clear()
        outs = call_user_code("the torch module", lambda: self._torch_outs(self.given))
        return not any(bool(torch.isnan(o).any()) for o in outs)

    # programs

    @once
    def torch_program(self, point: Point) -> TorchProgram:
        """Return the torch program of a point."""
        return self.recorded(point)

    def recorded(self, point: Point) -> TorchProgram:
        """Return a program of the module in the state that it has now."""
        torch.manual_seed(0)
        return TorchProgram(
            self.pair.module,
            point.inputs,
            point.targets,
            self.pair.kwargs,
            self.outputs.of_torch,
        )

    def other_state(self) -> tuple[dict[str, Array], list[Any]]:
        """Return another state of the torch module, and the JAX parameters that belong to it."""
        return self.map.moved(*self._other)

    def arguments(self, point: Point) -> tuple[Any, Any, Any]:
        """Return leaves, inputs and targets of the JAX side, floats in float64."""
        return (
            self.leaves,
            jax.tree.map(in_float64, list(point.inputs)),
            jax.tree.map(in_float64, list(point.targets)),
        )

    def jax_program(self, point: Point) -> JaxProgram:
        """Return the JAX program of a point."""
        shapes = point.shapes
        if shapes not in self._jax:
            self.outputs.shapes = [tuple(v.shape) for v in self._torch_outs(point)]
            self._jax[shapes] = call_user_code(
                "the JAX side",
                lambda: JaxProgram(self._function, *self.arguments(point)),
                _ONE_EXAMPLE if self.model.library == "equinox" else "",
            )
        return self._jax[shapes]

    def _function(self, leaves: Any, inputs: Any, targets: Any) -> tuple[list[Any], list[Any], Any]:
        """Return outputs, further results and loss of the port: what its program is traced from."""
        out, extras = self.model.call(leaves, inputs)
        return self.outputs.of_port(out, extras, targets)

    def _torch_outs(self, point: Point) -> list[torch.Tensor]:
        return Repairs().run(self.torch_program(point)).outs

    @once
    def jax_run(self, point: Point) -> JaxRun:
        """Return outputs, loss and gradients of the port."""
        return self.jax_program(point).run(*self.arguments(point))

    @once
    def forward(self, point: Point) -> Forward:
        """Return the port's outputs, its loss and the results of all its equations."""
        return self.jax_program(point).forward(*self.arguments(point))

    def cotangents(self, point: Point) -> list[Array]:
        """Return the gradient of the port's loss by all its values."""
        return self.jax_program(point).cotangents(*self.arguments(point))

    def _expect_outputs(self) -> None:
        """Run both sides on the given inputs.

        Raises:
            UsageError: one raises, their outputs cannot be compared, or both are NaN.
        """
        outs = call_user_code("the torch module", lambda: self._torch_outs(self.given))
        if not outs:
            raise UsageError("the torch module returns no tensor, or `outputs` keeps none")
        run = call_user_code("the JAX side", lambda: self.jax_run(self.given))
        if self.outputs.find_partners(outs, run):
            self._jax.clear()
            self.given.kept.clear()
            outs = self._torch_outs(self.given)
            if not outs:
                return
            run = self.jax_run(self.given)
        if self.outputs.turn(outs, run) and self.pair.jax_loss is None:
            self._jax.clear()  # the loss is one of the outputs in torch's layout
            self.given.kept.pop("jax_run")
        self._expect_numbers(outs, run)

    def _expect_numbers(self, outs: Sequence[torch.Tensor], run: JaxRun) -> None:
        pairs = zip(outs, run.outs, strict=False)
        floats = [(array(o), r) for o, r in pairs if o.is_floating_point()]
        if not floats or not all(np.isnan(o).all() for o, _ in floats):
            return
        empty = [(i, np.shape(x)) for i, x in enumerate(self.pair.inputs) if not np.size(x)]
        if empty:
            raise UsageError(
                "input {} is empty, of shape {}: expected at least one row".format(*empty[0])
            )
        are_both = all(np.isnan(r).all() for _, r in floats)
        who = "both sides are" if are_both else "the torch side is"
        raise UsageError(f"{who} NaN at the given inputs: expected numbers to compare")

    def exchange_outputs(self, order: Sequence[int]) -> None:
        """Compare torch's outputs with others of the port.

        Args:
            order: of each output of torch, the place of the port's among those that are compared.
        """
        self.outputs.exchange(order)
        self._jax.clear()
        # what was computed at a point has the outputs in the order before
        for point in self.points:
            point.kept.clear()

    # gradients

    def torch_gradients(
        self,
        program: TorchProgram,
        repairs: Repairs,
        leaves: Mapping[Any, torch.Tensor] | None = None,
    ) -> tuple[TorchRun, dict[str, Array]]:
        """Return a run of torch with its graph, and the gradient of each parameter, zeros where
        there is none, and of each input that has one.
        """
        inputs = [k for k in program.given if program.has_gradient(k)]
        trained = {("state", n) for n in program.parameters}
        given = {
            k: v.requires_grad_(k in inputs or k in trained) for k, v in (leaves or {}).items()
        }
        run = repairs.run(program, grad=True, inputs=given)
        names = [n for n in self.map.names if n in program.parameters]
        zeros = {n: np.zeros(self.map.base[n].shape) for n in names}
        # inputs are moved by repairs, too: their gradient is by what the module gets
        keys = {n: ("state", n) for n in names}
        keys |= {input_name(int(k[1])): k for k in inputs if run.leaves[k].is_leaf}
        return run, zeros | _gradients_by(run, keys)

    def gradients(self, run: JaxRun) -> dict[str, Array]:
        """Return the port's gradient of each torch tensor and of each input."""
        by_input = {input_name(i): g for i, g in run.input_gradients.items()}
        return self.pulled(run.gradients) | by_input

    def pulled(self, gradients: Sequence[Any]) -> dict[str, Array]:
        """Return the port's gradient of each torch tensor."""
        vector = self.map.pull(gradients)
        return {n: vector[self.map.part(n)].reshape(self.map.base[n].shape) for n in self.map.names}


def _gradients_by(run: TorchRun, keys: Mapping[str, Any]) -> dict[str, Array]:
    """Return the gradient of the loss by some leaves, under their names; none where there is none."""
    if not run.loss.requires_grad:
        return {}
    tensors = [run.leaves[k] for k in keys.values()]
    found = torch.autograd.grad(
        run.loss,
        tensors,
        allow_unused=True,
        retain_graph=True,
    )
    return {n: array(g) for n, g in zip(keys, found, strict=True) if g is not None}


def input_name(place: int) -> str:
    """Return what the gradient by an input is called."""
    return f"input {place}"
