"""Runs a loop of JAX on an instance: its loss as a pure function, an optimizer that is observed,
and the outcome.

The outcome is the record that a torch loop leaves, so whatever judges a run judges this one. An
ordered `io_callback` in the optimizer's `update` sees what reaches it, also through `jit`, `scan`
and `cond`.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import zip_longest
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import io_callback

from gradcheck_suite.catalogue.tables import is_accumulable, jax_output, loss_definition
from gradcheck_suite.core.contract import Batch, JaxTrainingRun, Loop, Problem, TrainingRun
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.environment import imported
from gradcheck_suite.run.instance import Instance, map_leaves
from gradcheck_suite.run.observer import Evaluation, Observation, TooManySteps, is_same_tensor
from gradcheck_suite.run.runner import Outcome, run_to_end

Function = Callable[..., jax.Array]


def to_torch(array: Any) -> torch.Tensor:
    """Return a copy of an array as a tensor of the same dtype."""
    # numpy's own conversion to torch knows no bfloat16; float32 holds it exactly
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(np.array(array, np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return a copy of a tensor as an array of the same dtype."""
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.detach().float().numpy(), jnp.bfloat16)
    # a copy: `jnp.asarray` may share the tensor's memory, into which a function with donated buffers
    # may write
    return jnp.array(tensor.detach().numpy())


# The loss and the count as pure functions.


def _expect_arrays(name: str, *trees: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(trees)[0]:
        if type(leaf).__module__.partition(".")[0] == "torch":
            raise UsageError(
                f"run.{name} takes JAX arrays and got a torch.{type(leaf).__name__} at"
                f" {jax.tree_util.keystr(path)}: hand it run.params and what run.batches yields"
            )


def pure_functions(instance: Instance) -> tuple[Function, Function]:
    """Return the loss and the count of a generated problem, as pure functions."""
    spec = instance.case.spec
    assert spec is not None
    if not is_accumulable(spec):
        raise CannotRunHere(
            "a loop of JAX cannot train a problem that is no sum over items: JAX has no code for it"
        )
    kind = loss_definition(spec.loss)
    options = spec.loss.o
    dtype = jnp.dtype(instance.case.dtype)
    model = instance.model()
    rest = (
        *model.named_buffers(),
        *((n, p) for n, p in model.named_parameters() if not p.requires_grad),
    )
    fixed: dict[str, Any] = {
        name: np.asarray(to_jax(tensor)) for name, tensor in rest if tensor.is_floating_point()
    }
    table = None if instance.item_counts is None else np.array(instance.item_counts, np.float32)

    def count(batch: Batch) -> jax.Array:
        _expect_arrays("count", batch)
        counts = (
            kind.jax_counts(options, batch)
            if table is None
            else jnp.asarray(table)[batch["x"].reshape(-1)]
        )
        return counts.sum().astype(jnp.promote_types(dtype, jnp.float32))

    def loss(params: Any, batch: Batch) -> jax.Array:
        _expect_arrays("loss", params, batch)
        # a number added to a numpy array of bfloat16 gives float32
        values = {**jax.tree.map(jnp.asarray, fixed), **params}
        total = kind.jax_items(options, jax_output(spec, values, batch), batch).sum()
        if spec.loss.reduction == "mean":
            divisor = count(batch)
            # the mean over no valid target would be 0/0, and its gradient NaN
            total = jnp.where(divisor == 0, 0.0, total / jnp.where(divisor == 0, 1.0, divisor))
        return (instance.scale * total).astype(dtype)

    return loss, count


# A user's problem of JAX, as a problem of torch: the references, the check whether it is a sum over
# items, and the bounds on rounding errors are then those of every problem.


ROUNDINGS = 16
"""How often what JAX is given, and the gradient, are rounded where a lower precision is simulated: nothing rounds the
results of the operations between them."""


def _rounded_again(tensor: torch.Tensor) -> torch.Tensor:
    for _ in range(ROUNDINGS if tensor.is_floating_point() else 0):
        tensor = tensor * 1.0
    return tensor


@dataclass(frozen=True)
class LiftedProblem(Problem):
    """A problem of torch whose loss and gradient JAX computes.

    Attributes:
        own: the problem of JAX.
        names: the names of the parameters, in the order of the leaves.
        tree: the structure of the parameters.
    """

    own: Problem = field(kw_only=True)
    names: tuple[str, ...] = field(kw_only=True)
    tree: Any = field(kw_only=True)


class _JaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Any, tree: Any, batch: Batch, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss, and keep its gradient."""
        with jax.enable_x64(True):
            leaves = [to_jax(p) for p in parameters]
            value, gradient = function(jax.tree.unflatten(tree, leaves), map_leaves(to_jax, batch))
            ctx.gradient = [to_torch(g) for g in jax.tree.leaves(gradient)]
            return to_torch(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        """Return the gradient, times the cotangent."""
        return None, None, None, *(g * cotangents[0].to(g.dtype) for g in ctx.gradient)


@cache
def as_torch_problem(problem: Problem) -> LiftedProblem:
    """Return a problem of JAX as one of torch.

    Raises:
        UsageError: the problem is not one of JAX, or its loss is no pure function with a scalar
            result.
    """
    params: Any = problem.model(0)
    if isinstance(params, torch.nn.Module) or not jax.tree.leaves(params):
        raise UsageError(
            "Problem.model(seed) must return a pytree of JAX arrays for a loop of JAX, got "
            f"{type(params).__name__}: pass a problem whose model and loss are of JAX"
        )
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    for path, leaf in paths:
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise UsageError(
                "Problem.model(seed) must return floating-point arrays, got"
                f" {jnp.asarray(leaf).dtype} at {jax.tree_util.keystr(path)}: keep what is not"
                " trained in the batch or in the loss"
            )
    names = tuple(
        jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in paths
    )
    _expect_pure(problem, params)
    function = jax.jit(jax.value_and_grad(problem.loss))

    def model(seed: int) -> torch.nn.Module:
        module = torch.nn.Module()
        with jax.enable_x64(True):
            values = [to_torch(jnp.asarray(leaf)) for leaf in jax.tree.leaves(problem.model(seed))]
        # not by `register_parameter`, which takes no name with a dot
        module._parameters.update(
            {name: torch.nn.Parameter(value) for name, value in zip(names, values, strict=True)}
        )
        return module

    def loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        given = map_leaves(_rounded_again, batch)
        found: torch.Tensor = _JaxLoss.apply(
            function, tree, given, *map(_rounded_again, module.parameters())
        )
        return found

    def batch(items: int, seed: int) -> Batch:
        with jax.enable_x64(True):
            return jax.tree.map(
                lambda leaf: to_torch(jnp.asarray(leaf)), problem.batch(items, seed)
            )

    own: Any = problem.count
    return LiftedProblem(
        model,
        batch,
        loss,
        problem.reduction,
        None if own is None else lambda batch: torch.tensor(float(own(map_leaves(to_jax, batch)))),
        own=problem,
        names=names,
        tree=tree,
    )


def _expect_pure(problem: Problem, params: Any) -> None:
    batch = jax.tree.map(jnp.asarray, problem.batch(3, 0))
    try:
        found = [
            problem.loss(params, batch),
            problem.loss(params, batch),
            jax.jit(problem.loss)(params, batch),
        ]
        shapes = {jnp.shape(value) for value in found}
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise UsageError(
            "Problem.loss(params, batch) must be a pure function of JAX: it fails with"
            f" {type(error).__name__}: {line}"
        ) from None
    if shapes != {()}:
        raise UsageError(
            f"Problem.loss(params, batch) must return a scalar array, got shape {shapes.pop()}"
        )
    first, *others = (float(value) for value in found)
    if not all(
        # compiled and eager code round in other orders; NaN is not equal to itself
        math.isclose(first, other, rel_tol=1e-4, abs_tol=1e-6) or first != first != other
        for other in others
    ):
        raise UsageError(
            f"Problem.loss(params, batch) must be pure, and returned {first:.6g}, {others[0]:.6g}"
            f" and, under jax.jit, {others[1]:.6g} for the same arguments: put what it draws or"
            " counts into the batch"
        )


# The optimizer, and what reaches its update.


@jax.tree_util.register_pytree_node_class
class ObservedState:
    """The state of an observed optimizer: the number of the call that made it, and the inner
    optimizer's state.

    JAX takes it apart where a compiled function receives it, and puts it together where one returns
    it. So the observer learns which states a loop goes on with: `optax.MultiSteps` calls the inner
    update at every micro-batch, and throws most of the results away.
    """

    def __init__(self, call: Any, inner: Any, observer: Any) -> None:
        self.call = call
        self.inner = inner
        self.observer = observer

    def __getattr__(self, name: str) -> Any:
        """Return what a loop reads of its optimizer's own state, such as `state.hyperparams`."""
        # copying and unpickling ask before there is any state
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, place: Any) -> Any:
        """Return a part of the optimizer's own state, such as `state[0]` of a chain."""
        return self.inner[place]

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """Return the leaves, and the observer."""
        self.observer.note(self.call, "in")
        return (self.call, self.inner), self.observer

    @classmethod
    def tree_unflatten(cls, observer: Any, children: Sequence[Any]) -> ObservedState:
        """Return a state of these leaves."""
        observer.note(children[0], "out")
        call, inner = children
        return cls(call, inner, observer)


@dataclass
class _UpdateCall:
    """A call of `update`: by each device that takes part, the gradient, the parameters and the
    updates, as leaves.
    """

    number: int
    parent: int
    devices: int
    eager: bool
    seen: dict[int, tuple[list[Any], list[Any] | None, list[Any]]] = field(default_factory=dict)

    def is_repeated_by(self, other: _UpdateCall) -> bool:
        """Whether another call has the same state, perhaps made by another `init`, and the same
        gradient.
        """
        # states that `init` has made have negative numbers
        if max(self.parent, 0) != max(other.parent, 0):
            return False
        return all(
            all(map(partial(np.array_equal, equal_nan=True), gradient, other.seen[d][0]))
            for d, (gradient, *_) in self.seen.items()
        )


@dataclass(frozen=True)
class _Event:
    """A state that a compiled function received (`in`) or returned (`out`), after so many calls of
    `update`.
    """

    calls: int
    number: int
    way: str


class JaxObserver:
    """An optimizer whose `update` is observed."""

    NUMBER = jax.ShapeDtypeStruct((), jnp.int32)

    def __init__(self, params: Any, inner: Any, limit: int) -> None:
        """Start observing.

        Args:
            params: the parameters, a pytree.
            inner: the optimizer that computes the updates; None for updates of zeros.
            limit: number of calls after which the loop is stopped.
        """
        self._leaves, self._tree = jax.tree.flatten(params)
        self._inner = inner
        self._limit = limit
        self._lock = Lock()
        self._roots = 0
        self._calls = list[_UpdateCall]()
        self._events = list[_Event]()
        self.structure: str | None = None
        self.exceeded = self.is_multi_steps = False

    def transformation(self, optax: Any) -> Any:
        """Return the `optax.GradientTransformationExtraArgs`."""
        return optax.GradientTransformationExtraArgs(self._init, self._update)

    def note(self, number: Any, way: str) -> None:
        """Note a state that crosses the border of a compiled function, but not one that is being
        traced.
        """
        if (
            isinstance(number, jax.Array)
            and not isinstance(number, jax.core.Tracer)
            and not number.shape
        ):
            # a buffer that was donated to a compiled function (`donate_argnums`)
            if number.is_deleted():
                return
            value = int(number)  # waits until the function has run, and so have its callbacks
            self._events.append(_Event(len(self._calls), value, way))

    def _init(self, params: Any) -> ObservedState:
        self.is_multi_steps |= _is_called_from("/optax/transforms/_accumulation.py")
        inner = () if self._inner is None else self._inner.init(params)
        # without `ordered`, JAX may run callbacks in any order:
        # https://docs.jax.dev/en/latest/_autosummary/jax.experimental.io_callback.html
        root = (
            io_callback(self._root, self.NUMBER, ordered=True)
            if _is_traced(params)
            else jnp.asarray(self._root())
        )
        return ObservedState(root, inner, self)

    def _root(self) -> np.int32:
        with self._lock:
            self._roots -= 1
            return np.int32(self._roots)

    def _update(
        self, updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, ObservedState]:
        if not isinstance(state, ObservedState):
            raise TypeError(
                "run.optimizer.update takes the state that its init returned, got"
                f" {type(state).__name__}"
            )
        # ordered callbacks are refused under `pmap` with an error that names neither the loop nor a
        # way out
        if _is_called_from("/jax/_src/pmap.py"):
            raise TypeError(
                "run.optimizer.update is called under jax.pmap, which is not supported: use"
                " jax.shard_map"
            )
        device, devices = _device()
        gradient = self._as_params(updates, "a gradient")
        known = None if params is None else self._as_params(params)
        if self._inner is None:
            made = jax.tree.map(jnp.zeros_like, updates)
            inner = state.inner
        else:
            made, inner = self._inner.update(updates, state.inner, params)
        arguments = (gradient, known, self._as_params(made) if self._inner else [])
        given = state.call, device, arguments
        traced = _is_traced(given)
        record = partial(self._record, devices, not traced)
        # what an eager callback returns lies on one device alone, and no function over several
        # would take it
        call = (
            io_callback(record, self.NUMBER, *given, ordered=True)
            if traced
            else jnp.asarray(record(*given))
        )
        return made, ObservedState(call, inner, self)

    def _as_params(self, tree: Any, what: str = "parameters") -> list[Any]:
        """Return the leaves of a gradient.

        Parameters may come in another container, or joined to one vector.
        """
        found = jax.tree.leaves(tree)
        shapes = [leaf.shape for leaf in self._leaves]
        # the container may be another one: `jax.tree.map` over a dataclass gives the same leaves
        if [leaf.shape for leaf in found] == shapes:
            return found
        sizes = [leaf.size for leaf in self._leaves]
        # one vector, as `jax.flatten_util.ravel_pytree` makes it
        if len(found) == 1 and found[0].shape == (sum(sizes),):
            parts = jnp.split(found[0], np.cumsum(sizes)[:-1])
            return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        due, got = (_described(t) for t in (jax.tree.unflatten(self._tree, self._leaves), tree))
        self.structure = (
            f"run.optimizer.update was handed {what} of another tree than run.params: expected"
            f" {due}, received {got}"
        )
        return [jnp.zeros_like(leaf) for leaf in self._leaves]

    def _record(
        self, devices: int, eager: bool, parent: Any, device: Any, arguments: Any
    ) -> np.int32:
        gradient, params, made = arguments
        seen = tuple(
            None if part is None else [np.array(a) for a in part]
            for part in (gradient, params, made)
        )
        with self._lock:
            # a callback cannot raise through a compiled function: the loop is stopped at its next
            # batch
            if len(self._calls) >= self._limit:
                self.exceeded = True
                return np.int32(parent)
            # each device calls back by itself: a call is whole when all of them have
            of_parent = [call for call in self._calls if call.parent == int(parent)]
            if not of_parent or len(of_parent[-1].seen) == of_parent[-1].devices:
                self._calls.append(
                    _UpdateCall(
                        len(self._calls) + 1,
                        int(parent),
                        devices,
                        eager,
                    )
                )
                of_parent = self._calls[-1:]
            of_parent[-1].seen[int(device)] = seen  # type: ignore[assignment]
            return np.int32(of_parent[-1].number)

    def steps(self, due: int) -> list[_UpdateCall]:
        """Return the calls whose result the loop went on with, of which `due` are promised.

        A call that compiles the step, or whose updates are discarded, is no step: a later call goes
        on from the state that it was handed. A loop that loses its state does the same in place of
        a step, so that all its calls count.
        """
        found = self._kept()
        of_number = {call.number: call for call in found}
        chain = list[_UpdateCall]()
        last = found[-1] if found else None
        while last is not None:
            chain.insert(0, last)
            last = of_number.get(last.parent)
        if len(chain) == due:
            return chain
        ends = of_number.keys() - {call.parent for call in found}
        return [
            call
            for call, after in zip_longest(found, found[1:])
            if after is None
            or call.number not in ends
            or after.number in ends
            or not call.is_repeated_by(after)
        ]

    def _kept(self) -> list[_UpdateCall]:
        kept = {call.parent for call in self._calls}
        kept |= {event.number for event in self._events if event.way == "out"}
        return [c for c in self._calls if c.number in kept or not self._is_thrown_away(c)]

    def _is_thrown_away(self, call: _UpdateCall) -> bool:
        later = self._calls[call.number :]
        sibling = next((c for c in later if c.parent == call.parent), None)
        until = len(self._calls) if sibling is None else sibling.number - 1
        ways = {
            event.way
            for event in self._events
            if event.number == call.parent and call.number <= event.calls <= until
        }
        # the state from before the call was handed on
        if "out" in ways:
            return True
        # within one compiled function, which selected the result of the later call
        return sibling is not None and not call.eager and "in" not in ways


def _described(tree: Any) -> str:
    """Return the path and the shape of each leaf, in words."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return ", ".join(f"{name(path)} {leaf.shape}".strip() for path, leaf in paths) or "no leaves"


def _device() -> tuple[Any, int]:
    """Return the index of the device among those of `shard_map` that run this code, and their
    number.
    """
    mesh = jax.sharding.get_abstract_mesh()
    index = jnp.int32(0)
    devices = 1
    for axis in mesh.manual_axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
        devices *= mesh.shape[axis]
    return index, devices


def _is_traced(tree: Any) -> bool:
    """Return whether JAX is tracing a function: the tree holds what it traces, or whatever is made
    here is traced.
    """
    return any(
        isinstance(leaf, jax.core.Tracer)
        for leaf in (*jax.tree.leaves(tree), jnp.zeros((), jnp.int32) + 0)
    )


def _is_called_from(file: str) -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


OBSERVER = (
    ObservedState,
    _UpdateCall,
    _Event,
    JaxObserver,
    _described,
    _device,
    _is_traced,
    _is_called_from,
)
"""What a stand-alone script copies, which therefore needs jax and optax alone."""


# A run.


class Batches:
    """The micro-batches of an epoch in order, as JAX arrays.

    Every pass makes new ones, which a loop may donate.
    """

    def __init__(self, instance: Instance, observer: JaxObserver) -> None:
        self._instance = instance
        self._observer = observer

    def __len__(self) -> int:
        return len(self._instance.case.plan.micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        for items in self._instance.case.plan.cuts:
            if self._observer.exceeded:
                raise TooManySteps
            yield map_leaves(to_jax, self._instance.batch(items))


def jax_optimizer(name: str | None) -> Any:
    """Return the optax transformation of a case's optimizer, None for updates of zeros.

    It is what the function of that name in optax returns for a learning rate, or for no argument.

    Raises:
        CannotRunHere: optax is missing.
        UsageError: optax has no such function, or it needs other arguments.
    """
    if name is None:
        return None
    optax: Any = imported("optax")
    if isinstance(optax, str):
        raise CannotRunHere(NEEDS_OPTAX.format(optax))
    if name == "normalized":
        return optax.chain(_normalize(optax), optax.trace(decay=0.5), optax.scale(-0.02))
    factory = getattr(optax, name, None)
    # most take a learning rate; those such as `optax.set_to_zero` take nothing
    made = None
    raised = ""
    for arguments in ((LEARNING_RATE,), ()):
        if made is None and inspect.isfunction(factory):
            # a function of another kind, or one with other arguments, raises anything
            try:
                made = factory(*arguments)
            except Exception as error:
                raised = " ".join(f", which raises {type(error).__name__}: {error}".split())
    if not isinstance(made, optax.GradientTransformation):
        raise UsageError(
            "optimizer of a loop of JAX must be normalized, or a function of optax that makes an"
            " optimizer from a learning rate alone, such as sgd, adam, adamw, lion or lamb; got"
            f" {name!r}{raised}"
        )
    return made


LEARNING_RATE = 0.01
NEEDS_OPTAX = "a loop of JAX needs optax, and {}: install gradcheck-suite[jax-loops]"


def _normalize(optax: Any) -> Any:
    """Return the transformation that divides each gradient by its largest element."""

    def divided(gradient: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(gradient), initial=0.0)
        return gradient / jnp.where(largest == 0, 1.0, largest).astype(gradient.dtype)

    return optax.stateless(lambda updates, _: jax.tree.map(divided, updates))


@contextmanager
def _fast_compilation(generated: bool) -> Iterator[None]:
    """Compile without most optimizations, where a program is small and runs a few times: that takes
    half the time.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", generated or before)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


MOST_CALLS = 4
"""Calls of `update` for each step that a loop may take: a wrapper such as `MultiSteps` calls it in every micro-batch,
and on every device."""


def run_jax_loop(loop: Loop, instance: Instance, *, time_limit_s: float | None) -> list[Outcome]:
    """Run a loop of JAX and return its outcome, one for each device on which it calls `update`.

    Raises:
        CannotRunHere: optax is missing, or the loop cannot import what it needs.
        UsageError: the loop is no loop of JAX, or asks for what this cannot give.
    """
    case = instance.case
    optax = imported("optax")
    if isinstance(optax, str):
        raise CannotRunHere(NEEDS_OPTAX.format(optax))
    if case.device != "cpu":
        raise CannotRunHere(f"loops of JAX are verified on the CPU alone, got device {case.device}")
    with jax.enable_x64(case.dtype == "float64"):
        return _run_loop(loop, instance, optax, time_limit_s)


def _run_loop(
    loop: Loop, instance: Instance, optax: Any, time_limit_s: float | None
) -> list[Outcome]:
    case = instance.case
    names, params, loss, count = _parts(instance)
    start = {n: to_torch(a) for n, a in zip(names, jax.tree.leaves(params), strict=True)}
    observer = JaxObserver(params, jax_optimizer(case.optimizer), MOST_CALLS * case.plan.step_limit)
    run = JaxTrainingRun(
        params=params,
        optimizer=observer.transformation(optax),
        batches=Batches(instance, observer),
        loss=loss,
        count=count,
        accumulation_steps=case.plan.accumulation_steps,
        epochs=case.plan.epochs,
        reduction=instance.problem.reduction,
        dtype=jnp.dtype(case.dtype),
    )
    with _fast_compilation(case.spec is not None):
        ending = run_to_end(
            loop,
            run,
            time_limit_s,
            expect=_expect_jax,
            exceeded=lambda: observer.exceeded,
            # callbacks run when the device gets to them, which may be after the loop has returned
            finish=jax.effects_barrier,
        )
    steps = observer.steps(case.plan.steps)
    devices = max((call.devices for call in steps), default=1)
    outcomes = []
    for device in range(devices):
        seen = _observations(steps, device, names, start)
        outcomes.append(
            Outcome(
                observations=seen,
                start=start,
                beginning=Observation(
                    (),
                    start,
                    [{}],
                    [names],
                ),
                parameters=seen[-1].after if seen else start,
                structure=observer.structure,
                keeps_non_finite=observer.is_multi_steps,
                **ending,
            )
        )
    return outcomes


def _parts(instance: Instance) -> tuple[list[str], Any, Function, Function]:
    """Return the names of the parameters, in the order of their leaves, the parameters, the loss
    and the count.
    """
    model = instance.model()
    problem = instance.users_problem
    if isinstance(problem, LiftedProblem):
        params = jax.tree.unflatten(problem.tree, [to_jax(p) for p in model.parameters()])
        return [*problem.names], params, *_users_functions(instance, problem.own)
    params = {name: to_jax(p) for name, p in model.named_parameters() if p.requires_grad}
    return sorted(params), params, *pure_functions(instance)


def _users_functions(instance: Instance, problem: Problem) -> tuple[Function, Function]:
    counted = problem.count
    dtype = jnp.dtype(instance.case.dtype)

    def loss(params: Any, batch: Batch) -> jax.Array:
        _expect_arrays("loss", params, batch)
        value: Any = problem.loss(params, batch)
        return (instance.scale * value).astype(dtype)

    def count(batch: Batch) -> jax.Array:
        _expect_arrays("count", batch)
        found = jax.tree.leaves(batch)[0].shape[0] if counted is None else counted(batch)
        return jnp.asarray(found, jnp.promote_types(dtype, jnp.float32))

    return loss, count


_OF_TORCH = {field.name for field in fields(TrainingRun)} - {
    field.name for field in fields(JaxTrainingRun)
}


_VMAPPED = (
    "run.optimizer.update or init is called under jax.vmap, which is not supported: call it once a"
    " window, on the accumulated gradient"
)


def _expect_jax(error: BaseException, run: JaxTrainingRun) -> None:
    """Raise `UsageError` where a loop failed because of what it was written for, and not because of
    a fault.

    It takes what a torch loop is given, hands tensors to the loss, or calls the optimizer where
    nothing is observed.
    """
    if isinstance(error, UsageError) or "under jax.pmap, which is not supported" in str(error):
        raise UsageError(str(error)) from None
    if "Cannot `vmap` ordered IO callback" in str(error):
        raise UsageError(_VMAPPED) from None
    if isinstance(error, AttributeError) and error.obj is run and error.name in _OF_TORCH:
        raise UsageError(
            f"the loop asks for run.{error.name}, which a loop of torch is given, and it is"
            " declared as one of JAX: drop the decorator or --framework jax, or use run.params,"
            " run.batches and run.loss(params, batch)"
        ) from None


def _observations(
    steps: Sequence[_UpdateCall], device: int, names: Sequence[str], start: dict[str, torch.Tensor]
) -> list[Observation]:
    """Return what reached the optimizer of a device.

    The state is the number of the step that made it. What a step leaves is computed here, and is
    what the next step finds where the two differ by a rounding error alone: a compiled function may
    round once where two roundings are written.
    """
    found = list[Observation]()
    expected = start
    first = names[0]
    places = {0: 0} | {call.number: place + 1 for place, call in enumerate(steps)}
    for call in steps:
        # a replicated update may be called back on one device alone
        gradient, params, made = call.seen.get(device) or next(iter(call.seen.values()))
        given = (
            expected
            if params is None
            else {n: to_torch(a) for n, a in zip(names, params, strict=True)}
        )
        parameters = {n: _as_known(value, expected[n], start[n]) for n, value in given.items()}
        if found and all(_is_close(value, expected[n]) for n, value in parameters.items()):
            found[-1].after.update(parameters)
        changes = [to_torch(a) for a in made] or [torch.zeros(())] * len(names)
        expected = {
            n: (
                parameters[n]
                if not change.any()
                else (parameters[n] + change).to(parameters[n].dtype)
            )
            for n, change in zip(names, changes, strict=True)
        }
        found.append(
            Observation(
                (
                    Evaluation(
                        {n: to_torch(a) for n, a in zip(names, gradient, strict=True)}, parameters
                    ),
                ),
                after=dict(expected),
                settings=[{}],
                groups=[list(names)],
                state={first: {"step": places.get(max(call.parent, 0), 0)}},
                state_after={first: {"step": places[call.number]}},
                is_computed=True,
            )
        )
    return found


def _as_known(value: torch.Tensor, *known: torch.Tensor) -> torch.Tensor:
    """Return the known tensor that a value is the same as, or the value."""
    return next((tensor for tensor in known if is_same_tensor(value, tensor)), value)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    few = 8 * torch.finfo(other.dtype).eps
    return bool(
        torch.isclose(
            one.double(), other.double(), rtol=few, atol=few * math.sqrt(few), equal_nan=True
        ).all()
    )
