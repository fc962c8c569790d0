"""Both sides of a pair at one state and at several inputs, and how far rounding drives them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.changes import RAISED
from gradcheck_suite.port.jax_program import (
    TABLE_MARGIN,
    EquationResult,
    JaxProgram,
    JaxRun,
    in_float64,
    rounding_table,
)
from gradcheck_suite.port.mapping import StateMap
from gradcheck_suite.port.matching import Side, array, outputs_error
from gradcheck_suite.port.number_sets import Array, error, turn, with_axes_aligned
from gradcheck_suite.port.pair import (
    JaxModel,
    Port,
    call_user_code,
    flat_output,
    is_number,
    named_outputs,
    set_state,
)
from gradcheck_suite.port.search import Repairs, Witness
from gradcheck_suite.port.torch_program import TorchProgram, TorchRun

RESOLUTION = 1e-9
"""Relative difference of float64 results that is not looked at. Faults start at 1e-6 (an eps, one item in a million);
forms that are equal but for a threshold, as torch's softplus beyond 20, differ by 1e-10."""
MARGIN = 64.0
"""Multiple of the effect of one rounding of every parameter and input that all further roundings are taken for."""


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


@dataclass
class Bounds:
    """What rounding explains at one point.

    Attributes:
        outputs: relative difference of an output, and of the loss.
        gradients: name -> largest difference of an element of its gradient.
        rounded: whether part of it comes from tables that were computed in float32.
    """

    outputs: float
    gradients: dict[str, float] = field(default_factory=dict)
    rounded: bool = False


_ONE_EXAMPLE = (
    "an Equinox model usually takes one example: give apply=lambda model, *x: jax.vmap(model)(*x)"
    " and params=model"
)
Forward = tuple[list[Array], float, list[EquationResult]]
Value = TypeVar("Value")


def once(compute: Callable[[Any, Point], Value]) -> Callable[[Any, Point], Value]:
    """Keep what a method returns at a point for as long as there is the point."""

    def kept(self: Any, point: Point) -> Value:
        if compute.__name__ not in point.kept:
            point.kept[compute.__name__] = compute(self, point)
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
        unmatched: outputs of torch that the port has not, in words.
        notes: which outputs are compared, where their names do not say it.
    """

    def __init__(self, pair: Port, model: JaxModel, state_map: StateMap, seed: int) -> None:
        self.pair = pair
        self.model = model
        self.map = state_map
        self.given = Point(pair.inputs, pair.targets)
        self.points = [self.given]
        self._jax: dict[Any, JaxProgram] = {}
        self._axes: dict[Any, tuple[int, ...]] = {}
        self._shapes: list[tuple[int, ...]] = []
        self._names: list[str] = []
        self._their_names: list[str] = []
        self._left_out: set[int] = set()
        self._partners: list[int] | None = None
        self.unmatched: list[str] = []
        self.notes: list[str] = []
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

    # outputs and loss of both sides

    def kept(self, out: Any) -> Any:
        """Return what is compared of an output."""
        return out if self.pair.outputs is None else self.pair.outputs(out)

    def _torch_ends(self, out: Any, *targets: Any) -> tuple[Any, torch.Tensor]:
        named = [o for o in named_outputs(self.kept(out)) if isinstance(o.value, torch.Tensor)]
        named = [o for i, o in enumerate(named) if i not in self._left_out]
        self._names = [o.name for o in named]
        kept = [o.value for o in named]
        if self.pair.torch_loss is not None:
            loss = self.pair.torch_loss(out, *targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UsageError("torch_loss: expected a scalar tensor")
            return kept, loss.reshape(())
        total = torch.zeros((), dtype=torch.float64)
        for i, o in enumerate(kept):
            if isinstance(o, torch.Tensor) and o.is_floating_point():
                total = total + (o * torch.as_tensor(_cotangent(i, tuple(o.shape)))).sum()
        return kept, total

    def _function(self, leaves: Any, inputs: Any, targets: Any) -> tuple[list[Any], list[Any], Any]:
        out, extras = self.model.call(leaves, inputs)
        count = len(self._shapes)
        if (
            isinstance(out, tuple)
            and len(out) == 2
            and len(flat_output(self.kept(out[0]))) == count != 0
        ):
            more = flat_output(out[1])
            if len(flat_output(out)) > count:  # (output, updated state)
                out = out[0]
                extras = [*extras, *more]
        named = named_outputs(self.kept(out))
        self._their_names = [o.name for o in named]
        order = self._order(self._their_names)
        flat = [jnp.asarray(named[i].value) for i in order[:count]]
        extras = [*(named[i].value for i in order[count:]), *extras]
        if self.pair.jax_loss is not None:
            loss = jnp.asarray(self.pair.jax_loss(out, *targets))
            if loss.size != 1:
                raise UsageError(f"jax_loss: expected a scalar, got an array of shape {loss.shape}")
            return flat, extras, loss.astype(jnp.float64).sum()
        total = jnp.zeros(())
        for i, (o, shape) in enumerate(zip(flat, self._shapes, strict=False)):
            if jnp.issubdtype(o.dtype, jnp.floating) and o.size == np.prod(shape):
                total = (
                    total
                    + (self._turned(o.astype(jnp.float64), shape) * _cotangent(i, shape)).sum()
                )
        return flat, extras, total

    def _order(self, theirs: Sequence[str]) -> list[int]:
        """Return the places of the port's outputs in torch's order: by their names, where both
        sides have names, and else as they stand.
        """
        chosen = self._partners
        if chosen is None and set(self._names) <= set(theirs) and all(self._names):
            left = list(range(len(theirs)))
            chosen = []
            for name in self._names:  # several outputs, as of a list, may have one name
                chosen.append(next((i for i in left if theirs[i] == name), left[0]))
                left.remove(chosen[-1])
        chosen = [i for i in chosen or [] if i < len(theirs)]
        return [*chosen, *(i for i in range(len(theirs)) if i not in chosen)]

    def _turned(self, value: Any, shape: tuple[int, ...]) -> Any:
        if value.shape == shape:
            return value
        axes = self._axes.get((value.shape, shape))
        return value.reshape(shape) if axes is None else value.transpose(axes)

    # programs

    @once
    def torch_program(self, point: Point) -> TorchProgram:
        """Return the torch program of a point."""
        return self._recorded(point)

    def _recorded(self, point: Point) -> TorchProgram:
        torch.manual_seed(0)
        return TorchProgram(
            self.pair.module, point.inputs, point.targets, self.pair.kwargs, self._torch_ends
        )

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
            self._shapes = [tuple(v.shape) for v in self._torch_outs(point)]
            self._jax[shapes] = call_user_code(
                "the JAX side",
                lambda: JaxProgram(self._function, *self.arguments(point)),
                _ONE_EXAMPLE if self.model.library == "equinox" else "",
            )
        return self._jax[shapes]

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

    @once
    def side(self, point: Point) -> Side:
        """Return all numbers of the port."""
        return self._numbers(point, self.arguments(point), self.forward(point))

    def _numbers(self, point: Point, arguments: Any, ran: Forward) -> Side:
        program = self.jax_program(point)
        bounds = self.bounds(point)
        given = [np.asarray(a) for a in chain.from_iterable(arguments) if is_number(a)]
        more = [
            a.astype(np.float64) if a.dtype.kind == "f" else a for a in (*program.constants, *given)
        ]
        more = [a for a in more if a.dtype.kind in "fiub"]
        tolerance = max(RESOLUTION, bounds.outputs) if bounds.rounded else RESOLUTION
        outs, loss, results = ran
        values = [r.value for r in results]
        equations = [r.equation for r in results]
        return Side(
            [*values, *more],
            [*equations, *[None] * len(more)],
            outs,
            loss,
            tolerance,
        )

    def witnesses(self, point: Point) -> Iterator[Witness]:
        """Yield other parameters at a point, and the other points: what is said of one holds at all
        of them.
        """
        names = [c.name for c in self.torch_program(point).calls]
        found = self._at_other_state(point)
        if [c.name for c in found.program.calls] == names:
            yield found
        # what a port does may depend on the sizes, as the padding of SAME does
        for other in (p for p in self.points if p is not point and p.shapes == point.shapes):
            if [c.name for c in self.torch_program(other).calls] == names:
                allowed = self.bounds(other).outputs
                yield Witness(
                    self.torch_program(other), self.side(other), allowed, same_inputs=False
                )

    @once
    def _at_other_state(self, point: Point) -> Witness:
        state, leaves = self.map.moved(*self._other)
        set_state(self.pair.module, state)
        try:
            program = self._recorded(point)
        finally:
            set_state(self.pair.module, self.state)
        arguments = (leaves, *self.arguments(point)[1:])
        ran = self.jax_program(point).forward(*arguments)
        return Witness(program, self._numbers(point, arguments, ran), self.bounds(point).outputs)

    def _expect_outputs(self) -> None:
        """Run both sides on the given inputs.

        Raises:
            UsageError: one raises, their outputs cannot be compared, or both are NaN.
        """
        outs = call_user_code("the torch module", lambda: self._torch_outs(self.given))
        if not outs:
            raise UsageError("the torch module returns no tensor, or `outputs` keeps none")
        run = call_user_code("the JAX side", lambda: self.jax_run(self.given))
        if self._is_matched_otherwise(outs, run):
            outs = self._torch_outs(self.given)
            if not outs:
                return
            run = self.jax_run(self.given)
        for o, r in zip(outs, run.outs, strict=False):
            axes = turn(r.shape, tuple(o.shape), r, array(o))
            if axes is not None:
                self._axes[r.shape, tuple(o.shape)] = axes
        if self._axes and self.pair.jax_loss is None:
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

    def _is_matched_otherwise(self, outs: Sequence[torch.Tensor], run: JaxRun) -> bool:
        """Find the partners of torch's outputs where names or shapes do not say them.

        What has no partner is noted as unmatched, and left out. Return whether anything is other
        than it was taken for.
        """
        theirs = list(run.outs)
        own = list(self._names)
        is_named = all(own) and all(self._their_names)
        others = set(own) - set(self._their_names) if is_named else set()
        if len(theirs) == len(outs) and not others and all(map(_same_size, outs, theirs)):
            return False
        every = [*theirs, *run.extras]
        order = self._order(self._their_names)
        left = list(range(len(every)))
        partners = list[int]()
        for i, out in enumerate(outs):
            fits = [k for k in left if _same_size(out, every[k]) and k < len(order)]
            fits = [k for k in fits if self._may_be_partner(i, k, order, is_named=is_named)]
            if not fits:
                self._left_out.add(i)
                self.unmatched.append(self._without_partner(i, out, theirs))
                continue
            wanted = array(out)
            errors = {k: error(with_axes_aligned(array(every[k]), wanted), wanted) for k in fits}
            best = min(fits, key=errors.__getitem__)
            left.remove(best)
            partners.append(order[best])
            if own[i] in others:
                theirs_name = self._their_names[order[best]]
                self.notes.append(
                    f"torch's output {own[i]!r} is compared with the port's {theirs_name!r}, whose"
                    " numbers are nearest: the names differ"
                )
        self._partners = partners
        self._jax.clear()
        self.given.kept.clear()
        return True

    def _may_be_partner(
        self, mine: int, other: int, order: Sequence[int], *, is_named: bool
    ) -> bool:
        """Return whether an output of the port may be one of torch's, by names or places.

        Args:
            mine: place of torch's.
            other: place of the port's, among those in `order`.
            order: places of the port's outputs.
            is_named: whether outputs have names on both sides.
        """
        if not is_named:
            return other == mine
        name = self._their_names[order[other]]
        if self._names[mine] in self._their_names:
            return name == self._names[mine]
        return name not in self._names

    def _without_partner(self, place: int, out: torch.Tensor, theirs: Sequence[Any]) -> str:
        """Return in words that an output of torch is none of the port's."""
        observed = f"one of shape {theirs[place].shape}" if place < len(theirs) else "none"
        label = f" {place}" if len(self._names) > 1 else ""
        label = f" {self._names[place]!r}" if self._names[place] else label
        shape = tuple(out.shape)
        return f"expected the output{label} of shape {shape}, observed {observed}"

    def output_names(self) -> list[str]:
        """Return the names of torch's outputs, or their places."""
        return [repr(n) if n else str(i) for i, n in enumerate(self._names)]

    def exchange_outputs(self, order: Sequence[int]) -> None:
        """Compare torch's outputs with others of the port.

        Args:
            order: of each output of torch, the place of the port's among those that are compared.
        """
        before = self._order(self._their_names)
        self._partners = [before[k] for k in order]
        self._jax.clear()
        # what was computed at a point has the outputs in the order before
        for point in self.points:
            point.kept.clear()

    # bounds

    @once
    def bounds(self, point: Point) -> Bounds:
        """Return what rounding explains: the effect of moving every number by about its rounding
        error.
        """
        program = self.torch_program(point)
        run = self.jax_run(point)
        base, torch_gradients = self.torch_gradients(program, Repairs())
        bounds = Bounds(RESOLUTION)
        sizes = {n: float(np.abs(g).max(initial=0.0)) for n, g in torch_gradients.items()}
        least = 1e-3 * RESOLUTION * max(sizes.values(), default=0.0) + 1e-300
        bounds.gradients = {n: 10 * RESOLUTION * size + least for n, size in sizes.items()}
        for draw in range(2):
            moved, others = self._rounded(program, base, draw)
            self._add(
                bounds,
                outputs_error(base.outs, moved.outs),
                torch_gradients,
                others,
                MARGIN,
            )
        if tables := self._tables(program):
            moved, others = self.torch_gradients(program, Repairs(), tables)
            self._add(
                bounds,
                outputs_error(base.outs, moved.outs),
                torch_gradients,
                others,
                1.0,
            )
            bounds.rounded = True
        unit = UNIT_ROUNDOFF["float32"]
        moves = {
            i: rounding_table(self.leaves[i])[1]
            for i, leaf in enumerate(self.map.leaves)
            if leaf and leaf.is_constant
        }
        kept = {i: self.leaves[i] + unit * move for i, move in moves.items() if move is not None}
        if kept or self.jax_program(point).rounded:
            leaves = [kept.get(i, leaf) for i, leaf in enumerate(self.leaves)]
            shifted = self.jax_program(point).run(leaves, *self.arguments(point)[1:], shift=unit)
            off = outputs_error([*run.outs, run.loss], [*shifted.outs, shifted.loss])
            before = self.gradients(run)
            after = self.gradients(shifted)
            self._add(
                bounds,
                off + TABLE_MARGIN * unit,
                before,
                after,
                1.0,
            )
            bounds.rounded = True
        return bounds

    def _add(
        self,
        bounds: Bounds,
        off: float,
        torch_gradients: Mapping[str, Array],
        others: Mapping[str, Array],
        factor: float,
    ) -> None:
        bounds.outputs += factor * (off if np.isfinite(off) else 0.0)
        for name in bounds.gradients:
            if name in torch_gradients and name in others:
                change = np.abs(others[name] - torch_gradients[name])
                bounds.gradients[name] += factor * float(
                    change[np.isfinite(change)].max(initial=0.0)
                )

    def _rounded(
        self, program: TorchProgram, base: TorchRun, draw: int
    ) -> tuple[TorchRun, dict[str, Array]]:
        """Return a run with every number moved by one unit roundoff, and its gradients.

        A roundoff may leave the domain: torch refuses a target above 1 in `binary_cross_entropy`,
        and the arc cosine beyond 1 is NaN. Then numbers stay in the range of their own array, and
        last only parameters are moved.
        """
        for kept in (_anywhere, _inside_of_range):
            try:
                leaves = self._rounded_leaves(program, draw, kept)
                run, torch_gradients = self.torch_gradients(program, Repairs(), leaves)
            except RAISED:
                continue
            if _finite_alike(base, run):
                return run, torch_gradients
        leaves = self._rounded_leaves(program, draw, _anywhere)
        of_state = {key: value for key, value in leaves.items() if key[0] == "state"}
        return self.torch_gradients(program, Repairs(), of_state)

    def _rounded_leaves(
        self,
        program: TorchProgram,
        draw: int,
        kept: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[Any, torch.Tensor]:
        """Return state and inputs moved by one unit roundoff.

        Args:
            program: of torch.
            draw: seed of the signs.
            kept: (moved, as it was) -> what is taken of an input.
        """
        generator = torch.Generator().manual_seed(draw)
        found: dict[Any, torch.Tensor] = {}
        tied: dict[int, torch.Tensor] = {}
        for key, value in program.leaves().items():
            if value.is_floating_point():
                if id(value) not in tied:
                    sign = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
                    if key[0] != "state":  # equal numbers stay equal: a sort may take the others
                        places = torch.unique(value, return_inverse=True)[1]
                        sign = sign.reshape(-1)[places]
                    moved = value * (1 + sign * 2 * UNIT_ROUNDOFF["float64"])
                    tied[id(value)] = moved if key[0] == "state" else kept(moved, value)
                found[key] = tied[id(value)]
        return found

    def _tables(self, program: TorchProgram) -> dict[Any, torch.Tensor]:
        """Return tables of torch's that were computed in float32 and that the port does not load,
        moved by that.
        """
        used = self.map.used()
        found = {}
        for (kind, name), value in program.leaves().items():
            free = kind == "state" and name in self.map.names and name not in self.map.movable
            if kind == "constant" or (free and not used[self.map.part(name)].any()):
                move = rounding_table(value.numpy())[1] if value.dtype == torch.float64 else None
                if move is not None:
                    found[kind, name] = value + torch.as_tensor(UNIT_ROUNDOFF["float32"] * move)
        return found

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
        torch_gradients = {n: np.zeros(self.map.base[n].shape) for n in names}
        # inputs are moved by repairs, too: their gradient is by what the module gets
        keys = {n: ("state", n) for n in names}
        keys |= {input_name(int(k[1])): k for k in inputs if run.leaves[k].is_leaf}
        return run, torch_gradients | _torch_gradients_by(run, keys)

    def gradients(self, run: JaxRun) -> dict[str, Array]:
        """Return the port's gradient of each torch tensor and of each input."""
        by_input = {input_name(i): g for i, g in run.input_gradients.items()}
        return self.pulled(run.gradients) | by_input

    def pulled(self, gradients: Sequence[Any]) -> dict[str, Array]:
        """Return the port's gradient of each torch tensor."""
        vector = self.map.pull(gradients)
        return {n: vector[self.map.part(n)].reshape(self.map.base[n].shape) for n in self.map.names}


def _torch_gradients_by(run: TorchRun, keys: Mapping[str, Any]) -> dict[str, Array]:
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


def exchanged(
    mine: Sequence[torch.Tensor], theirs: Sequence[Any], allowed: float
) -> list[int] | None:
    """Return which of the port's outputs each of torch's is, None where they are not the same ones
    at other places.
    """
    left = list(range(len(theirs)))
    order = list[int]()
    for i, out in enumerate(mine):
        # its own comes first: equal outputs are not exchanged
        alike = [k for k in sorted(left, key=lambda k, i=i: k != i) if _same_size(out, theirs[k])]
        partner = next((k for k in alike if outputs_error([out], [theirs[k]]) <= allowed), None)
        if partner is None:
            return None
        left.remove(partner)
        order.append(partner)
    return None if order == sorted(order) else order


def _same_size(mine: torch.Tensor, other: Any) -> bool:
    return mine.numel() == np.size(other)


def input_name(place: int) -> str:
    """Return what the gradient by an input is called."""
    return f"input {place}"


def _anywhere(moved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return moved


def _inside_of_range(moved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return moved.clamp(value.min(), value.max()) if value.numel() else moved


def _finite_alike(base: TorchRun, run: TorchRun) -> bool:
    """Return whether a run has no number that is not finite where another run has a finite one."""
    pairs = zip([*base.outs, base.loss], [*run.outs, run.loss], strict=True)
    return all(bool((torch.isfinite(new) | ~torch.isfinite(old)).all()) for old, new in pairs)


def _cotangent(index: int, shape: tuple[int, ...]) -> Array:
    """Return what an output is multiplied by where there is no loss."""
    return np.asarray(np.random.default_rng(index).normal(size=shape))
