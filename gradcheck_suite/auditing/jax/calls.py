"""Stands in place of `jax.jit` and `jax.pmap`: a compiled function that is looked at before it is
called.

The user's own program is the one that JAX would have compiled. To look at a call, its program is
traced through JAX's cache, which the call itself then uses: the script's Python runs once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

# neither name is public: `run.private_names` says before an audit whether this JAX has them
from jax._src.api_util import infer_argnums_and_argnames
from jax._src.core import trace_state_clean

from gradcheck_suite.auditing.jax.equations import bind
from gradcheck_suite.auditing.jax.functions import printed_once
from gradcheck_suite.auditing.jax.losses import UNMARKED


@dataclass(frozen=True)
class CompiledCall:
    """A call of a compiled function.

    Attributes:
        closed: its program.
        leaves: the arguments of the program.
        name: of the function.
    """

    closed: Any
    leaves: list[Any]
    name: str


class CallObserver(Protocol):
    """Looks at calls."""

    def wants_calls(self) -> bool:
        """Return whether calls are looked at now."""

    def on_call(self, function: object, look: Callable[[], CompiledCall]) -> None:
        """Look at a call before it is made; raises nothing."""


OBSERVERS: list[CallObserver] = []
"""That of the audit that is open."""


def is_eager() -> bool:
    """Return whether nothing is being traced."""
    return bool(trace_state_clean())


@dataclass(frozen=True)
class StaticArguments:
    """The arguments that a function is compiled for.

    Attributes:
        numbers: of those given by position.
        names: of those given by name.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]

    @staticmethod
    def of(function: Callable[..., Any], options: dict[str, Any]) -> StaticArguments:
        """Return those that the options of `jit` name: one of the two says the other, too."""
        numbers = options.get("static_argnums")
        names = options.get("static_argnames")
        if numbers is not None or names is not None:
            try:
                signature = inspect.signature(function)
            except (TypeError, ValueError):  # of a function in C
                pass
            else:
                numbers, names = infer_argnums_and_argnames(signature, numbers, names)
        return StaticArguments(_as_tuple(numbers), _as_tuple(names))

    def dynamic(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the other arguments."""
        fixed = self.positions(len(args))
        own = [one for i, one in enumerate(args) if i not in fixed]
        return own, {name: one for name, one in kwargs.items() if name not in self.names}

    def positions(self, number: int) -> set[int]:
        """Return which of so many arguments by position are static."""
        return {n % number for n in self.numbers if -number <= n < number}


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


class Compiled:
    """What `jax.jit` returns, looked at before it is called.

    Args:
        function: that is compiled.
        real: what `jax.jit` returned for it.
        static: its static arguments.
    """

    def __init__(self, function: Callable[..., Any], real: Any, static: StaticArguments) -> None:
        functools.update_wrapper(self, function, updated=())
        self._real = real
        self._static = static

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look at the call, and make it."""
        observer = OBSERVERS[-1] if OBSERVERS else None
        # inside of another trace the call becomes a part of the outer program, and is looked at
        # there
        if observer is not None and observer.wants_calls() and is_eager():
            observer.on_call(self, lambda: self._look(args, kwargs))
        return self._real(*args, **kwargs)

    def _look(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CompiledCall:
        with printed_once():
            closed = self._real.trace(*args, **kwargs).jaxpr
        leaves = jax.tree.leaves(self._static.dynamic(args, kwargs))
        # a program that is given the wrong arguments says nothing of the call: do not look at it
        if len(leaves) != len(closed.jaxpr.invars):
            raise ValueError(f"{len(leaves)} arguments for {len(closed.jaxpr.invars)} inputs")
        return CompiledCall(closed, leaves, getattr(self, "__name__", "a compiled function"))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # a compiled method is bound, as any function in a class is
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask an object without attributes for its dunder methods: to look those
        # up in `_real` would look up `_real` without end
        if name.startswith("__") or name in ("_real", "_static"):
            raise AttributeError(name)
        return getattr(self._real, name)

    # a function is its own copy in Python, and what `jax.jit` returns passes for a function
    def __copy__(self) -> Compiled:
        return self

    def __deepcopy__(self, memo: Any) -> Compiled:
        return self

    def __reduce__(self) -> Any:
        return self._real.__reduce__()

    def __repr__(self) -> str:
        return repr(self._real)


class Mapped(Compiled):
    """What `jax.pmap` returns, looked at before it is called."""

    def _look(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CompiledCall:
        name = getattr(self, "__name__", "a mapped function")
        prepared = _inferred(self._real)
        if prepared is not None:
            # the compiled function that the call itself uses, so that nothing is traced twice
            found = prepared(*args, **kwargs)
            # since JAX 0.10 something that is kept comes before the compiled function
            first = 0 if hasattr(found[0], "trace") else 1
            jitted, leaves = found[first : first + 2]
            # JAX 0.9 keeps what was prepared, and raises in the program's own call if none of it was
            # traced
            with printed_once():
                return CompiledCall(jitted.trace(*leaves).jaxpr, list(leaves), name)
        own, named = self._static.dynamic(args, kwargs)
        fixed = self._static.positions(len(args))

        def call(*dynamic: Any, **rest: Any) -> Any:
            given = iter(dynamic)
            whole = [one if i in fixed else next(given) for i, one in enumerate(args)]
            return self._real(*whole, **rest)

        with contextlib.redirect_stdout(io.StringIO()):  # the call traces and prints it again
            closed = jax.make_jaxpr(call)(*own, **named)
        return CompiledCall(closed, jax.tree.leaves((own, named)), name)


def _inferred(mapped: Any) -> Callable[..., Any] | None:
    """Return the function by which `jax.pmap` prepares a call; None in a JAX that has it not.

    It returns the compiled function and the arguments of that one, among others.
    """
    lower = getattr(mapped, "lower", None)
    names = getattr(getattr(lower, "__code__", None), "co_freevars", ())
    # `pmap` has no public `trace`: its `lower` closes over the function that prepares a call
    if "infer_params" not in names:
        return None
    found: Callable[..., Any] = lower.__closure__[names.index("infer_params")].cell_contents  # type: ignore[union-attr]
    return found


class Loop:
    """A scan, a loop or a branch outside of any compiled function, which JAX compiles by itself.

    Its program was traced when it was called, so that the script's Python does not run again.

    Args:
        primitive: of JAX.
        real: evaluates it.
    """

    def __init__(self, primitive: Any, real: Callable[..., Any]) -> None:
        self._primitive = primitive
        self._real = real

    def __call__(self, *args: Any, **params: Any) -> Any:
        """Look at the loop, and evaluate it."""
        observer = OBSERVERS[-1] if OBSERVERS else None
        if observer is not None and observer.wants_calls() and is_eager():
            observer.on_call(self, lambda: self._look(args, params))
        return self._real(*args, **params)

    def _look(self, args: Sequence[Any], params: dict[str, Any]) -> CompiledCall:
        closed = jax.make_jaxpr(lambda *some: bind(self._primitive, params, some))(*args)
        return CompiledCall(closed, list(args), f"a {self._primitive.name}")


LOOPS = (jax.lax.scan_p, jax.lax.while_p, jax.lax.cond_p)
"""Primitives with programs in them that are evaluated outside of compiled functions, too."""


def jit(*functions: Any, **options: Any) -> Any:
    """Do what `jax.jit` does, and look at calls."""
    # `@jax.jit(static_argnums=0)` gives the options first, and the function to what is returned
    if not functions or not callable(functions[0]):
        decorate = UNMARKED.jit(*functions, **options)

        def decorated(function: Callable[..., Any]) -> Any:
            return Compiled(function, decorate(function), StaticArguments.of(function, options))

        return decorated
    (function,) = functions
    real = UNMARKED.jit(function, **options)
    return Compiled(function, real, StaticArguments.of(function, options))


def pmap(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do what `jax.pmap` does, and look at calls."""
    real = UNMARKED.pmap(function, *args, **options)
    numbers = _as_tuple(options.get("static_broadcasted_argnums"))
    return Mapped(function, real, StaticArguments(numbers, ()))
