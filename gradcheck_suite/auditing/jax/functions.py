"""What stands in place of the functions of JAX and optax that a script calls, and marks what they
give.

The loss is traced once, and what is traced is differentiated in its place: the script's Python runs
as often as it would. Where it cannot be traced, the plain function runs, and the pass is unseen.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import jax
import numpy as np

from gradcheck_suite.auditing.jax.equations import flatten, is_float
from gradcheck_suite.auditing.jax.losses import (
    UNMARKED,
    adds_up_over_devices,
    custom_rules,
    terms_of,
    varying,
)
from gradcheck_suite.auditing.jax.marks import Mark, PassMark, UpdateMark, coarsest_of, put_mark
from gradcheck_suite.auditing.places import Place, current_place


class _Stack(threading.local):
    """What a thread is inside of.

    Attributes:
        losses: the number of losses that are being traced: a gradient in one is no pass.
        updates: the updates that run, outermost first.
    """

    def __init__(self) -> None:
        self.losses = 0
        self.updates: list[UpdateMark] = []


@dataclass
class Marking:
    """Whether functions are marked, and what became of it.

    Attributes:
        is_on: whether a gradient that is asked for now is to be marked, or an update.
        failed: takes an error of the audit's own.
        traced: the marks that were put into a traced program.
        stepwise: the places of those that stand in a `shard_map` outside of compiled functions,
            which evaluates one operation after the other.
        unseen: the place of a gradient whose loss could not be traced -> how often.
        plain: losses that could not be traced, which are not tried again.
        owners: the number of optimizers so far.
        has_updates: whether an update of one was seen.
    """

    is_on: Callable[[type[Mark]], bool]
    failed: Callable[[Exception], None]
    traced: list[Mark] = field(default_factory=list)
    stepwise: set[Place] = field(default_factory=set)
    unseen: Counter[Place] = field(default_factory=Counter)
    plain: set[CodeType] = field(default_factory=set)
    owners: int = 0
    has_updates: bool = False

    def note(self, mark: Mark, result: Any) -> None:
        """Note a mark, one of whose results is given."""
        if not isinstance(result, jax.core.Tracer):
            return
        self.traced.append(mark)
        if type(getattr(result, "_trace", None)).__name__ == "ShardMapTrace":
            self.stepwise.add(mark.place)

    def new_owner(self) -> int:
        """Return the index of an optimizer that is made now."""
        self.owners += 1
        return self.owners


_stack = _Stack()
_marking: list[Marking] = []


@contextlib.contextmanager
def marking(now: Marking) -> Iterator[None]:
    """Let the replaced functions mark what they give."""
    _marking.append(now)
    try:
        yield
    finally:
        _marking.remove(now)


def _current(kind: type[Mark] = PassMark) -> Marking | None:
    """Return the marking that a call is to take part in, or None."""
    # of audits inside of each other, the innermost one marks
    if not _marking or _stack.losses or not _marking[-1].is_on(kind):
        return None
    return _marking[-1]


@contextlib.contextmanager
def _inside_of_loss() -> Iterator[None]:
    """Take no gradient for a pass: it belongs to a loss, or to the rule of a function in it."""
    _stack.losses += 1
    try:
        yield
    finally:
        _stack.losses -= 1


def place_here() -> Place:
    """Return the place in the user's files that runs."""
    found = current_place()
    return Place(found.path[0], found.path) if found.path else found


@contextlib.contextmanager
def printed_once() -> Iterator[None]:
    """Keep back what a call prints if it fails: it runs again, and prints it then."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    sys.stdout.write(printed.getvalue())


@dataclass(frozen=True)
class TracedLoss:
    """A loss that was traced.

    Attributes:
        closed: its program, of the leaves that it is differentiated by.
        evaluate: does what the loss does.
        leaves: those leaves.
        names: of them.
    """

    closed: Any
    evaluate: Callable[..., Any]
    leaves: list[Any]
    names: list[str]


def trace_loss(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> TracedLoss:
    """Trace a loss once.

    Everything but what it is differentiated by stays as it is, so that a loss may look at it.
    """
    given = [args[n] for n in argnums]
    paths, tree = jax.tree_util.tree_flatten_with_path(given)
    leaves = [leaf for _, leaf in paths]
    made: dict[str, Any] = {}

    def of_leaves(*some: Any) -> list[Any]:
        whole = list(args)
        for n, one in zip(argnums, jax.tree.unflatten(tree, some), strict=True):
            whole[n] = one
        # a loss may return more than arrays, such as a text beside its value: what is no tracer
        # stays as it was in this one run of the script's Python
        results, made["tree"] = jax.tree.flatten(function(*whole, **kwargs))
        traced = [isinstance(one, jax.core.Tracer) for one in results]
        made["results"] = [
            None if is_in else one for one, is_in in zip(results, traced, strict=True)
        ]
        made["traced"] = [i for i, is_in in enumerate(traced) if is_in]
        return [results[i] for i in made["traced"]]

    with _inside_of_loss():
        closed = jax.make_jaxpr(of_leaves)(*leaves)

    def evaluate(*some: Any, **_: Any) -> Any:
        now = jax.tree.leaves([some[n] for n in argnums])
        results = list(made["results"])
        computed = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *now)
        for i, value in zip(made["traced"], computed, strict=True):
            results[i] = value
        return jax.tree.unflatten(made["tree"], results)

    return TracedLoss(
        closed,
        evaluate,
        leaves,
        [_leaf_name(path[1:]) for path, _ in paths],
    )


def _leaf_name(path: Sequence[Any]) -> str:
    """Return the name of a leaf as its user knows it: `encoder.w`."""
    parts = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path)
    names = [str(one) for one in parts if str(one) not in ("", "value")]
    return ".".join(names)


def _traced_loss(
    now: Marking,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> TracedLoss | None:
    """Trace a loss; None where that is not possible."""
    code = getattr(function, "__code__", None)
    if code not in now.plain:
        # a loss that draws from numpy must draw the same numbers when its plain call runs it again
        state = np.random.get_state()
        try:
            with printed_once():
                return trace_loss(function, args, kwargs, argnums)
        except Exception:  # it looks at values, or is wrong: the plain call tells
            np.random.set_state(state)
            if code is not None:
                now.plain.add(code)
    now.unseen[place_here()] += 1
    return None


def _marked(
    now: Marking, loss: Any, gradient: Any, traced: TracedLoss, cotangent: Any = None
) -> Any:
    """Return a gradient that went through a mark; the gradient as it is where that fails."""
    try:
        return _mark_pass(now, loss, gradient, traced, cotangent)
    except Exception as error:
        now.failed(error)
        return gradient


def _mark_pass(now: Marking, loss: Any, gradient: Any, traced: TracedLoss, cotangent: Any) -> Any:
    results, tree = jax.tree.flatten(gradient)
    floats = [i for i, one in enumerate(results) if is_float(one)]
    given = [results[i] for i in floats]
    program = flatten(traced.closed)
    trained = [program.inputs[i] for i, leaf in enumerate(traced.leaves) if is_float(leaf)]
    # without a gradient of real numbers there is nothing that an optimizer could be given
    if not given or not trained or len(results) != len(traced.leaves):
        return gradient
    constants = list(program.constants.values())
    axes = _varying_over([loss, *traced.leaves, *constants])
    # the mark carries all that its summary needs: a value that it closed over would be a tracer of
    # another trace where the loss is inside of a compiled function
    inputs = [] if cotangent is None else [cotangent]
    inputs += [*traced.leaves, *constants, *program.literals.values()]
    data = list(program.constants)
    mark = PassMark(
        place=place_here(),
        shapes=tuple(one.shape for one in given),
        names=tuple(traced.names[i] for i in floats),
        dtype=coarsest_of(given),
        program=program,
        terms=terms_of(program, trained, data),
        trained=trained,
        data=data,
        rules=custom_rules(program, trained),
        # what differs between devices, where the gradient does not, JAX has added up over them
        reduced=tuple(sorted(axes - _varying_over(given))),
        adds_up_loss=adds_up_over_devices(program, trained),
        scaled=cotangent is not None,
    )
    through = put_mark(mark, given, [loss, *inputs])
    now.note(mark, through[0])
    for i, value in zip(floats, through, strict=True):
        results[i] = value
    return jax.tree.unflatten(tree, results)


def _varying_over(values: Sequence[Any]) -> frozenset[str]:
    return frozenset().union(*(varying(jax.typeof(one)) for one in values))


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Do what `jax.value_and_grad` does, and mark the gradient."""
    real = UNMARKED.value_and_grad(
        fun,
        argnums,
        has_aux,
        **options,
    )

    @functools.wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        now = _current()
        if now is None:
            return real(*args, **kwargs)
        numbers = _indices(argnums, len(args))
        traced = None if numbers is None else _traced_loss(now, fun, args, kwargs, numbers)
        if traced is None:
            return real(*args, **kwargs)
        of_traced = UNMARKED.value_and_grad(
            traced.evaluate,
            argnums,
            has_aux,
            **options,
        )
        with _inside_of_loss():
            value, gradient = of_traced(*args, **kwargs)
        loss = value[0] if has_aux else value
        return value, _marked(now, loss, gradient, traced)

    return wrapped


def _indices(argnums: int | Sequence[int], number: int) -> list[int] | None:
    """Return the arguments that a loss is differentiated by, None where they are not there."""
    found = [argnums] if isinstance(argnums, int) else list(argnums)
    fits = all(-number <= n < number for n in found)
    return [n % number for n in found] if fits and number else None


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Do what `jax.grad` does, and mark the gradient."""
    real = UNMARKED.grad(
        fun,
        argnums,
        has_aux,
        **options,
    )
    with_value = value_and_grad(
        fun,
        argnums,
        has_aux,
        **options,
    )

    @functools.wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _current() is None:
            return real(*args, **kwargs)
        value, gradient = with_value(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False, **options: Any) -> Any:
    """Do what `jax.vjp` does, and mark what the cotangent of a number gives."""
    now = _current()
    traced = None
    if now is not None:
        traced = _traced_loss(
            now,
            fun,
            primals,
            {},
            range(len(primals)),
        )
    if now is None or traced is None:
        return UNMARKED.vjp(
            fun,
            *primals,
            has_aux=has_aux,
            **options,
        )
    with _inside_of_loss():
        value, back, *aux = UNMARKED.vjp(
            traced.evaluate,
            *primals,
            has_aux=has_aux,
            **options,
        )
    # what an array's cotangent gives is no gradient of a loss
    if getattr(value, "shape", None) != () or not is_float(value):
        return (value, back, *aux)

    marked = _MarkedBack(now, traced)
    given = list(traced.leaves), list(traced.closed.consts)
    # a pytree, as what JAX returns is: it may be a residual, or the result of a compiled function
    return (
        value,
        jax.tree_util.Partial(
            marked,
            back,
            value,
            *given,
        ),
        *aux,
    )


class _MarkedBack:
    """Computes a gradient from a cotangent, and marks it.

    Args:
        now: the marking.
        traced: the loss.
    """

    def __init__(self, now: Marking, traced: TracedLoss) -> None:
        self._now = now
        self._traced = traced

    def __call__(
        self, back: Any, value: Any, leaves: list[Any], constants: list[Any], cotangent: Any
    ) -> Any:
        """Return the gradient.

        Args:
            back: what JAX returned.
            value: of the loss.
            leaves: that it is differentiated by.
            constants: that it was traced with.
            cotangent: of the value.
        """
        traced = self._traced
        if constants:  # where they were traced, others may stand in their place now
            traced = replace(traced, closed=traced.closed.replace(consts=constants))
        with _inside_of_loss():
            gradient = back(cotangent)
        return _marked(
            self._now,
            value,
            gradient,
            replace(traced, leaves=leaves),
            cotangent,
        )


# Optimizers.


def observed(update: Callable[..., Any], name: str, *, multi: bool = False) -> Callable[..., Any]:
    """Return an `update` of an optax transformation that marks what it is given."""
    # a transformation that is made of the `update` of another one, as wrappers do, is marked once
    if getattr(update, "is_observed_by_audit", False):
        return update
    owner = _marking[-1].new_owner() if _marking else 0

    @functools.wraps(update)
    def wrapped(updates: Any, state: Any, params: Any = None, *args: Any, **extra: Any) -> Any:
        now = _current(UpdateMark)
        if now is None:
            return update(
                updates,
                state,
                params,
                *args,
                **extra,
            )
        around = list(_stack.updates)
        mark = UpdateMark(
            place_here(),
            (),
            (),
            owner,
            name,
            depth=len(around),
            multi=multi,
        )
        # `MultiSteps` hands the mean of what it has gathered to the optimizer in it: that is what
        # the step is on
        mark.inside = bool(around) and around[-1].multi
        _stack.updates.append(mark)
        try:
            result, new = update(
                updates,
                state,
                params,
                *args,
                **extra,
            )
        finally:
            _stack.updates.pop()
        # of updates inside of others, only what `MultiSteps` hands on tells something
        if mark.depth and not mark.inside:
            return result, new
        return _mark_update(now, mark, updates, result, params), new

    wrapped.is_observed_by_audit = True  # type: ignore[attr-defined]
    return wrapped


def _mark_update(now: Marking, mark: UpdateMark, given: Any, result: Any, params: Any) -> Any:
    try:
        leaves, tree = jax.tree.flatten(result)
        through = [i for i, one in enumerate(leaves) if is_float(one)]
        paths = jax.tree_util.tree_flatten_with_path(given)[0]
        gradient = [(path, one) for path, one in paths if is_float(one)]
        # `update` without parameters is as usual as with them: SGD needs none
        known = [one for one in jax.tree.leaves(params) if is_float(one)]
        if not through or not gradient:
            return result
        mark.shapes = tuple(one.shape for _, one in gradient)
        mark.names = tuple(_leaf_name(path) for path, _ in gradient)
        mark.dtype = coarsest_of([one for _, one in gradient])
        now.has_updates = True
        mark.results = len(through)
        mark.parameters = len(known)
        values = [*(one for _, one in gradient), *known]
        marked = put_mark(mark, [leaves[i] for i in through], values)
        now.note(mark, marked[0])
        for i, value in zip(through, marked, strict=True):
            leaves[i] = value
        return jax.tree.unflatten(tree, leaves)
    except Exception as error:
        now.failed(error)
        return result


def seen_by_optimizer(gradient: Any, owner: int) -> Any:
    """Mark the gradient that an optimizer of `jax.example_libraries` is given, and return it."""
    now = _current(UpdateMark)
    if now is None:
        return gradient
    mark = UpdateMark(
        place_here(),
        (),
        (),
        owner,
        "optimizer",
    )
    return _mark_update(now, mark, gradient, gradient, None)
