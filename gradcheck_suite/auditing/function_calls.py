"""Calls of custom functions of autograd, recorded so that their `backward` can be judged.

Of each class one call of each kind is kept, up to `MOST` of a run: another shape, dtype or memory
layout, or another argument that is no tensor, may take another branch of its code. With a call go
the gradients that came to its outputs, and those that its `backward` gave for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from gradcheck_suite.auditing.modes import Apart
from gradcheck_suite.auditing.places import is_users
from gradcheck_suite.auditing.program_state import PLAIN, RandomState, names_in_code
from gradcheck_suite.auditing.samples import is_plain
from gradcheck_suite.auditing.saved_values import saved_tensors
from gradcheck_suite.run.functions import Forward, replaced_forwards, replaced_method

LARGEST = 2**23
"""Number of elements of a call's arguments above which it is not judged."""
LARGEST_FURTHER = 2**16
"""The same for calls after the first one of a class."""
MOST = 6
"""Calls of a class that are judged in a run."""
MOST_REACHED = 500
"""Objects that are looked through for the modules that an argument calls."""
_MARK = "_gradcheck_suite_call"


@dataclass(frozen=True, eq=False)
class Laid:
    """A gradient as it lay in memory.

    Attributes:
        values: a copy.
        stride: of the gradient itself, 0 where it was expanded.
    """

    values: torch.Tensor
    stride: tuple[int, ...]

    @staticmethod
    def of(gradient: Any) -> Laid | None:
        """Return a copy; None for what is no plain tensor."""
        # a sparse gradient has no strides
        if not isinstance(gradient, torch.Tensor) or gradient.layout != torch.strided:
            return None
        return Laid(gradient.detach().clone(), gradient.stride())

    def again(self, values: torch.Tensor) -> torch.Tensor:
        """Return values that lie in memory as it did: one element is the same as the others where
        it was expanded.
        """
        once = values
        for dim, step in enumerate(self.stride):
            if step == 0 and values.shape[dim]:
                once = once.narrow(dim, 0, 1)
        made = torch.empty_strided(
            once.shape, self.stride, dtype=values.dtype, device=values.device
        )
        return made.copy_(once).expand(values.shape)


@dataclass(eq=False)
class Backward:
    """What a call's `backward` was given, and gave, the first time.

    Attributes:
        given: the gradient of each output.
        returned: the gradient of each argument.
        written: indices of the arguments that it has saved, and that have other values by then than
            when it was called.
    """

    given: list[Laid | None]
    returned: list[Laid | None]
    written: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Bound:
    """A parameter of a module that an argument calls, which is an argument itself.

    Attributes:
        holder: the module's dict of parameters.
        name: in it.
        index: of the argument.
    """

    holder: dict[str, Any]
    name: str
    index: int


@dataclass(eq=False)
class FunctionCall:
    """One call of a custom function.

    Attributes:
        kind: its class.
        arguments: a copy of what it was called with.
        random: the random numbers that it drew from.
        by_itself: whether the class is the function whatever its arguments are: one that is made
            anew in each forward may have values from there, which belong to the arguments.
        leaves: indices of arguments that are parameters, to whose `.grad` is added what it gives.
        is_copied: whether its tensors are copies: a large call is not judged.
        memory: index of each tensor among the arguments -> where it lies.
        bound: arguments that are parameters of modules which other arguments call.
        outputs: copies of what it gave.
        wrote: indices of the tensors that need a gradient, to which it wrote without declaring it.
        backward: its first backward; None before that.
        is_differentiated: whether a further pass goes through what the `backward` of its class
            gives, as a gradient penalty does.
    """

    kind: Any
    arguments: list[Any]
    random: RandomState
    by_itself: bool = True
    leaves: frozenset[int] = frozenset()
    is_copied: bool = True
    memory: dict[int, int] = field(default_factory=dict)
    bound: list[Bound] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    wrote: list[int] = field(default_factory=list)
    backward: Backward | None = None
    is_differentiated: bool = False

    @property
    def calls_others(self) -> bool:
        """Whether it may call a module or another function that it is given."""
        return any(map(callable, self.arguments))

    @property
    def name(self) -> str:
        """The name of the class, or of the custom operator whose backward it is."""
        return name_of(self.kind)


def name_of(kind: Any) -> str:
    """Return the name of a custom function, or of the custom operator that torch has made it of."""
    for cell in getattr(inspect.unwrap(kind.forward), "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, torch._ops.OpOverload):
                return cell.cell_contents.name()
    return str(kind.__name__)


def of_operator(kind: Any) -> list[Any]:
    """Return the program's functions that run in a custom operator, whose class torch has made."""
    found = list[Any]()
    for method in (kind.forward, kind.backward):
        for cell in getattr(inspect.unwrap(method), "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                value = cell.cell_contents
                # torch/_library/autograd.py keeps the backward and its context's set-up in an Info
                found += [
                    getattr(value, name, None) for name in ("_backward_fn", "_setup_context_fn")
                ]
                if isinstance(value, torch._ops.OpOverload):
                    made: Any = torch._library.custom_ops.OPDEFS.get(value._schema.name)
                    found += [made._init_fn, *made._backend_fns.values()] if made else []
    return [each for each in found if isinstance(each, types.FunctionType)]


FunctionKey = Any
"""A class of a custom function, the statement that makes a new one each time (see `statement_of`), or one of these with
the signature of a call."""
Signature = tuple[Any, ...]


def call_signature(arguments: Sequence[Any]) -> Signature:
    """Return what the branches of a function may depend on, but for the values of tensors."""
    found = list[Any]()
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            found.append(
                (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            )
        # a number or a string may choose a branch, so its value counts; of anything else only its
        # type does
        elif isinstance(value, PLAIN):
            found.append((type(value), value))
        else:
            found.append(type(value))
    return tuple(found)


def statement_of(kind: Any) -> FunctionKey:
    """Return what all classes have that one statement has made, as in the forward of a module:
    names and code.
    """
    return (
        kind.__module__,
        kind.__qualname__,
        getattr(inspect.unwrap(kind.forward), "__code__", None),
    )


class _Bare(torch.autograd.Function):
    """A class statement gives it what it gives every class, such as the line of the statement from
    Python 3.13 on.
    """


_BARE = frozenset(vars(_Bare))


def _captured(kind: type) -> list[Any] | None:
    """Return the values that a class has from where it was made.

    None where some are no plain ones, such as tensors.
    """
    found: list[Any] = []
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                # the class's own name, which is bound when it is made
                with contextlib.suppress(ValueError):
                    found.append(cell.cell_contents)
            found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        elif name not in _BARE:
            found.append(value)
    found = [value for value in found if value is not kind]
    return found if all(isinstance(value, PLAIN) for value in found) else None


# What an argument calls.


@dataclass
class Reached:
    """What the arguments of a call lead to.

    Attributes:
        modules: that they may call.
        bare: whether they lead to a tensor that needs a gradient and is no module's parameter.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    bare: bool = False


def reached(values: Iterable[Any]) -> Reached:
    """Return what values that are no tensors lead to: modules, their methods, and functions that use
    them.
    """
    found = Reached()
    seen = set[int]()
    waiting = [value for value in values if not isinstance(value, torch.Tensor)]
    while waiting and len(seen) < MOST_REACHED:
        value = waiting.pop()
        # a class leads to everything in its module
        if id(value) in seen or isinstance(value, (*PLAIN, type)):
            continue
        seen.add(id(value))
        # not looked into: its parameters are those of the module
        if isinstance(value, torch.nn.Module):
            found.modules.append(value)
        elif isinstance(value, torch.Tensor):
            found.bare = found.bare or value.requires_grad
        else:
            waiting += _below(value)
    return found


def _below(value: Any) -> Iterable[Any]:
    """Return what one value leads to."""
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if not isinstance(value, types.FunctionType):
        inside = getattr(value, "__dict__", None)
        # an object with a `__dict__` of another kind may compute something at each access
        return inside.values() if type(inside) is dict else ()
    found = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    # a library's function may name half of the library among its globals
    if is_users(value.__code__.co_filename):
        names = names_in_code(value.__code__) & value.__globals__.keys()
        found += [value.__globals__[name] for name in names]
    return found


def _bound(arguments: Sequence[Any]) -> list[Bound]:
    places = {
        id(value): index for index, value in enumerate(arguments) if isinstance(value, torch.Tensor)
    }
    parts = chain.from_iterable(module.modules() for module in reached(arguments).modules)
    found = list[Bound]()
    for part in parts:
        found += [
            Bound(part._parameters, name, places[id(parameter)])
            for name, parameter in part._parameters.items()
            if id(parameter) in places
        ]
    return found


# Recording


def _copy(value: Any) -> Any:
    return (
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
    )


def _leaves(arguments: Sequence[Any]) -> frozenset[int]:
    return frozenset(
        index
        for index, value in enumerate(arguments)
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    )


def _needs_gradient(arguments: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments)


def _memory(arguments: Sequence[Any]) -> dict[int, int]:
    return {
        index: value.data_ptr()
        for index, value in enumerate(arguments)
        if isinstance(value, torch.Tensor) and is_plain(value)
    }


def _written(context: Any) -> list[int]:
    """Return the indices of the arguments that a call has saved, and that have other values now."""
    call: FunctionCall | None = getattr(context, _MARK, None)
    if call is None or call.backward is not None or not call.is_copied:
        return []
    # by where they lie: a saved tensor is another object than the argument
    saved = {one.data_ptr(): one for one in saved_tensors(context, "tensors") if is_plain(one)}
    found = list[int]()
    with Apart(), torch.no_grad():
        for index, memory in call.memory.items():
            now = saved.get(memory)
            then = call.arguments[index]
            if now is not None and now.shape == then.shape and not torch.equal(now, then):
                found.append(index)
    return found


def waits_for_ranks() -> bool:
    """Return whether a function may be called only where all ranks call it."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class FunctionCallRecorder:
    """Keeps one call of each kind of a class.

    Args:
        known: the kinds of calls that are known already.

    Attributes:
        calls: those that were recorded, by their keys and signatures.
        differentiated: the classes of which a further pass goes through what `backward` gives.
        failed: the classes of which a call could not be recorded, and the error.
    """

    def __init__(self, known: Set[FunctionKey]) -> None:
        self.calls: dict[FunctionKey, dict[Signature, FunctionCall]] = {}
        self.known: Set[FunctionKey] = known
        self.differentiated = set[type]()
        self.failed = dict[Any, str]()
        self._last: FunctionCall | None = None

    def _try(self, kind: Any, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what recording gives; None where it fails, which is kept to be said.

        Nothing is raised into the program.
        """
        try:
            return work(*arguments)
        except Exception as error:
            self.failed.setdefault(kind, f"{type(error).__name__}: {error}")
            return None

    @contextlib.contextmanager
    def watching(self, kind: Any, key: FunctionKey, *, by_itself: bool = True) -> Iterator[None]:
        """Record the calls of a class while this is open."""

        def forward_of(forward: Forward, first: int) -> Forward:
            def recorded(*arguments: Any) -> Any:
                call: FunctionCall | None = None
                if not torch.compiler.is_compiling():
                    begin = functools.partial(self._begin, by_itself=by_itself)
                    call = self._try(kind, begin, kind, key, arguments[first:])
                output = forward(*arguments)
                if call is not None:
                    context = arguments[0] if first else None
                    self._try(kind, self._end, call, context, arguments[first:], output)
                return output

            return recorded

        def backward_of(backward: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(context: Any, *gradients: Any) -> Any:
                if torch.compiler.is_compiling():
                    return backward(context, *gradients)
                written = self._try(kind, _written, context) or []
                found = backward(context, *gradients)
                note = self._note_backward
                self._try(kind, note, kind, context, gradients, found, written)
                return found

            return recorded

        def context_of(setup: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(context: Any, inputs: Any, output: Any) -> Any:
                compiles = torch.compiler.is_compiling()
                if not compiles and (call := self._last) is not None and call.kind is kind:
                    self._last = None
                    self._try(kind, setattr, context, _MARK, call)
                return setup(context, inputs, output)

            return recorded

        function = torch.autograd.Function
        # a class has the one or the other, and torch refuses both:
        # https://pytorch.org/docs/stable/generated/torch.autograd.Function.vjp.html
        way = "backward" if kind.vjp is function.vjp else "vjp"
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced_forwards([(kind, forward_of)]))
            stack.enter_context(replaced_method(kind, way, backward_of))
            if kind.setup_context is not function.setup_context:
                stack.enter_context(replaced_method(kind, "setup_context", context_of))
            yield

    def _begin(
        self, kind: Any, key: FunctionKey, arguments: Sequence[Any], *, by_itself: bool
    ) -> FunctionCall | None:
        of_class = self.calls.setdefault(key, {})
        is_first = not of_class and key not in self.known
        if not _needs_gradient(arguments) or len(of_class) >= MOST:
            return None
        # ranks whose batches differ in shape would wait for each other's collectives
        if not is_first and waits_for_ranks():
            return None
        # under `torch.func` the arguments are wrappers, which hold no values outside of it
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        # a class is judged again once a gradient penalty goes through it
        signature = (kind in self.differentiated, *call_signature(arguments))
        if signature in of_class or (key, signature) in self.known:
            return None
        size = sum(value.numel() for value in arguments if isinstance(value, torch.Tensor))
        # the first call of a class is worth a large copy, the further ones are not
        if not is_first and size > LARGEST_FURTHER:
            return None
        with Apart():
            # a call beyond `LARGEST` is not judged, so nothing of it is copied
            small = size <= LARGEST
            given = [_copy(value) if small else value for value in arguments]
            call = FunctionCall(
                kind,
                given,
                RandomState.now(),
                by_itself,
                _leaves(arguments),
                small,
                _memory(arguments),
                _bound(arguments),
            )
        of_class[signature] = call
        return call

    def _end(self, call: FunctionCall, context: Any, arguments: Sequence[Any], output: Any) -> None:
        with Apart():
            self._end_apart(call, context, arguments, output)

    def _end_apart(
        self, call: FunctionCall, context: Any, arguments: Sequence[Any], output: Any
    ) -> None:
        # a forward with a context of its own; without, `setup_context` gets the context later
        if context is not None:
            setattr(context, _MARK, call)
            dirty = getattr(context, "dirty_tensors", None) or ()
        else:
            self._last = call
            dirty = ()
        if not call.is_copied:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        call.outputs = [_copy(value) for value in outputs]
        changed = [
            index
            for index, (now, then) in enumerate(zip(arguments, call.arguments, strict=True))
            if isinstance(now, torch.Tensor) and not torch.equal(now, then)
        ]
        # what the forward itself has written to is no memory of what it was called with
        call.memory = {i: at for i, at in call.memory.items() if i not in changed}
        call.wrote = [
            index
            for index in changed
            if arguments[index].requires_grad and not any(arguments[index] is one for one in dirty)
        ]

    def _note_backward(
        self,
        kind: type,
        context: Any,
        gradients: Sequence[Any],
        found: Any,
        written: list[int],
    ) -> None:
        returned = found if isinstance(found, tuple) else (found,)
        # with `create_graph` a backward has gradients enabled, and what it gives has a graph
        if torch.is_grad_enabled() and kind not in self.differentiated:
            for gradient in returned:
                # no hook is left on a tensor of the program's own that it may give
                is_new = isinstance(gradient, torch.Tensor) and not gradient.is_leaf
                if is_new and gradient.requires_grad:
                    gradient.register_hook(functools.partial(self._note_further, kind))
        call: FunctionCall | None = getattr(context, _MARK, None)
        if call is None or call.backward is not None or not call.is_copied:
            return
        with Apart(), torch.no_grad():
            given = [*map(Laid.of, gradients)]
            call.backward = Backward(given, [*map(Laid.of, returned)], written)

    def _note_further(self, kind: type, _: torch.Tensor) -> None:
        self.differentiated.add(kind)


@contextlib.contextmanager
def first_calls(
    kinds: Set[type],
    known: Set[FunctionKey] = frozenset(),
    failed: dict[Any, str] | None = None,
) -> Iterator[dict[FunctionKey, dict[Signature, FunctionCall]]]:
    """Record the first call of each kind of each class while this is open.

    Where the statement that made one of the classes makes another one meanwhile, the first calls of
    those are recorded.

    Args:
        kinds: the classes.
        known: the kinds of calls that are known already.
        failed: to which classes are added of which a call could not be recorded, with the error.
    """
    recorder = FunctionCallRecorder(known)
    if failed is not None:
        recorder.failed = failed
    statements = {statement_of(kind): _captured(kind) for kind in kinds}
    with contextlib.ExitStack() as stack:

        def again(kind: type) -> None:
            if (statement := statement_of(kind)) in statements:
                values = _captured(kind)
                by_itself = values is not None and values == statements[statement]
                stack.enter_context(recorder.watching(kind, statement, by_itself=by_itself))

        for kind in kinds:
            stack.enter_context(recorder.watching(kind, kind))
        stack.enter_context(_each_new_function(again))
        yield recorder.calls


@contextlib.contextmanager
def _each_new_function(tell: Callable[[type], None]) -> Iterator[None]:
    """Tell of each class of a custom function that is made while this is open."""
    function: Any = torch.autograd.Function

    def told(kind: Any, /, **keywords: Any) -> None:
        super(function, kind).__init_subclass__(**keywords)
        tell(kind)

    function.__init_subclass__ = classmethod(told)
    try:
        yield
    finally:
        # torch's class has no method of this name of its own, so the inherited one stands again
        del function.__init_subclass__


class CallsOfProgram:
    """Records calls of classes in the program itself, with what came back to them.

    The methods of a class are replaced from the moment it is known until it needs no more calls.

    Attributes:
        is_muted: whether the suite itself calls them.
    """

    def __init__(self) -> None:
        self.is_muted = False
        self._recorder = _Muted(self)
        self._hoped = set[type]()
        self._judged = dict[type, int]()
        self._stacks = dict[type, contextlib.ExitStack]()

    def watch(self, kinds: Iterable[type], known: Set[FunctionKey] = frozenset()) -> None:
        """Record further calls of some classes.

        Args:
            kinds: the classes.
            known: the classes and kinds of calls that were judged elsewhere.
        """
        self._recorder.known |= known - self._hoped
        for kind in kinds:
            if kind in self._stacks or self._judged.get(kind, 0) >= MOST:
                continue
            if kind not in known:
                self._hoped.add(kind)
            self._stacks[kind] = contextlib.ExitStack()
            self._stacks[kind].enter_context(self._recorder.watching(kind, kind))

    @property
    def failed(self) -> Mapping[Any, str]:
        """The classes of which a call could not be recorded, and the error."""
        return self._recorder.failed

    @property
    def has_calls(self) -> bool:
        """Whether some can be judged."""
        calls = chain.from_iterable(each.values() for each in self._recorder.calls.values())
        return any(map(_is_ready, calls))

    def taken(self) -> list[FunctionCall]:
        """Return what was recorded, and let the classes go of which enough was."""
        found = list[FunctionCall]()
        for kind, calls in self._recorder.calls.items():
            ready = {signature: one for signature, one in calls.items() if _is_ready(one)}
            found += ready.values()
            is_differentiated = kind in self._recorder.differentiated
            for call in ready.values():
                call.is_differentiated = is_differentiated
            self._recorder.known |= {
                (kind, (is_differentiated, *signature[1:])) for signature in ready
            }
            self._judged[kind] = self._judged.get(kind, 0) + len(ready)
            if ready:
                self._hoped.discard(kind)
                self._recorder.known |= {kind}
            if self._judged[kind] >= MOST and kind in self._stacks:
                self._stacks.pop(kind).close()
        # a call without a backward, as of an evaluation, keeps no room
        self._recorder.calls = {}
        return found

    def close(self) -> set[type]:
        """Let all classes go, and return those that were watched in vain."""
        for stack in self._stacks.values():
            stack.close()
        unseen = self._hoped
        self._hoped = set()
        self._stacks = {}
        self._recorder.calls = {}
        return unseen


def _is_ready(call: FunctionCall) -> bool:
    return call.backward is not None or not call.is_copied


class _Muted(FunctionCallRecorder):
    """A recorder that leaves out what the suite calls."""

    def __init__(self, owner: CallsOfProgram) -> None:
        super().__init__(set())
        self._owner = owner

    def _begin(
        self, kind: Any, key: FunctionKey, arguments: Sequence[Any], *, by_itself: bool
    ) -> FunctionCall | None:
        if self._owner.is_muted:
            return None
        return super()._begin(
            kind,
            key,
            arguments,
            by_itself=by_itself,
        )


@contextlib.contextmanager
def given_copies(indices: Mapping[type, Set[int]]) -> Iterator[None]:
    """Give functions copies of some arguments while this is open, so that what they write to these
    is read by no other.

    Args:
        indices: of the arguments of each class.
    """

    def made(kind: type) -> Callable[[Forward, int], Forward]:
        def of_forward(forward: Forward, first: int) -> Forward:
            def with_copies(*arguments: Any) -> Any:
                own = [
                    _copy(value) if index in indices[kind] else value
                    for index, value in enumerate(arguments[first:])
                ]
                return forward(*arguments[:first], *own)

            return with_copies

        return of_forward

    with replaced_forwards((kind, made(kind)) for kind in indices):
        yield
