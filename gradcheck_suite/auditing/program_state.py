"""What a call of a model or of a custom function may change in the program, put back after it is
called once more.

A walker, and no copy of the model: a deepcopy leaves state in globals, class attributes and
closures as the call has left it (10 tests broke), and cloudpickle, which reaches them, takes 400 ms
for each copy.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from gradcheck_suite.auditing.modes import Apart
from gradcheck_suite.auditing.places import is_suites, is_users


def states_of_devices() -> tuple[torch.Tensor, ...]:
    """Return the states of the generators of GPUs that are in use."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return tuple(torch.cuda.get_rng_state_all()) if used else ()


@dataclass(frozen=True)
class RandomState:
    """The states of the generators of torch (CPU and GPUs), numpy and Python."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    numpy: Any
    python: Any

    @staticmethod
    def now() -> RandomState:
        """Return the present states."""
        return RandomState(
            torch.get_rng_state(),
            states_of_devices(),
            np.random.get_state(),
            random.getstate(),
        )

    def set(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Put the generators back after work of the suite's own, which no mode of the program sees.

    An import alone may draw, as rich's does.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(Apart())
        # a GPU on which a kernel has failed raises for all that follows (`torch.AcceleratorError`);
        # and this opens and closes an audit, where no error of ours may reach the program
        with contextlib.suppress(Exception):
            undo.callback(RandomState.now().set)
        yield


_PLAIN = frozenset(vars(torch.nn.Module()))


class NotRecomputed(Exception):
    """Why a window cannot be computed again."""


MOST_STATE = 5000
"""Objects that are looked through before a model is called once more."""
LARGEST_STATE = 1 << 22
"""Elements of a tensor outside of the model's parameters and buffers that is copied to be put back."""
PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    types.ModuleType,
)
_DRAWN_FROM = ("__next__", "get_nowait", "recv_bytes")
"""Methods of what gives something else each time and cannot be put back: iterators, queues, connections."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LANGUAGE = ("builtins", "functools", "types")
"""Modules whose objects stand between a name and what the user put there: bound methods, partials, properties."""
_LEADS = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset", "fdel")
"""Attributes through which those objects lead on."""


class Undo:
    """What puts something back, the last thing first; it may be called again and again."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def callback(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Add a call."""
        self._calls.append((function, arguments))

    def run(self) -> None:
        """Put everything back: where something cannot be, the rest is."""
        failed: BaseException | None = None
        # without an `ExitStack`, which takes longer than the rest where layers are thousands
        for function, arguments in reversed(self._calls):
            try:
                function(*arguments)
            except BaseException as error:
                failed = error
        if failed is not None:
            raise failed


class ProgramState:
    """What a call of a model may change, put back by `undo`: what its code and its hooks reach in
    Python.

    Frozen parameters; trained ones and buffers, which `replay` replaces, where the code has a
    further reference to them. Attributes, slots, globals, class attributes and closures, containers
    and objects below them, tensors and generators of random numbers, also through bound methods and
    decorators. Of an object or a function of a library its own attributes are kept, not those of
    further objects of libraries below it; torch's objects are left alone. What cannot be put back,
    such as an iterator or a queue, ends it.

    Args:
        subject: a model, or a custom function of autograd.
        kinds: further classes whose methods the call may run, as of tensors.
        values: what the call is given, and may write to or call.

    Raises:
        NotRecomputed: something cannot be put back.
    """

    def __init__(
        self,
        subject: torch.nn.Module | type,
        kinds: Iterable[type] = (),
        values: Iterable[Any] = (),
    ) -> None:
        parts = list(subject.modules()) if isinstance(subject, torch.nn.Module) else []
        self.undo = Undo()
        self._parts = {id(part) for part in parts}
        self._own = {
            id(t)
            for t in chain.from_iterable(
                (*part._parameters.values(), *part._buffers.values()) for part in parts
            )
        }
        self._seen: set[tuple[int, bool]] = set()
        parameters = list(chain.from_iterable(part._parameters.values() for part in parts))
        for kind in {*kinds, *map(type, parameters)}:
            self._walk_class(kind)
        # a program may count calls of all modules
        self._walk(vars(torch.nn.Module)["__call__"])
        for part in parts:
            self.undo.callback(_refill, vars(part), _content(vars(part)))
            self._keep_slots(part, library=False)
            self._walk_all(value for name, value in vars(part).items() if name not in _PLAIN)
            self._walk_class(type(part))
            for held in (part._parameters, part._buffers, part._modules):
                self.undo.callback(_refill, held, _content(held))
            self._walk_all(
                p for p in part._parameters.values() if p is not None and not p.requires_grad
            )
            self._walk_all((*part._forward_hooks.values(), *part._forward_pre_hooks.values()))
        if isinstance(subject, type):
            self._walk_class(subject)
        self._walk_all(values)

    def _walk_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if (id(base), False) in self._seen or not _is_users_class(base):
                continue
            self._seen.add((id(base), False))
            self.undo.callback(_drop_new_attributes, base, frozenset(vars(base)))
            for name, value in list(vars(base).items()):
                if not isinstance(value, types.FunctionType):
                    if name.startswith("__"):  # `__dict__` and the like cannot be set
                        self._walk(getattr(value, "__func__", None))
                        continue
                    # what records its calls stands in its place for a while
                    if isinstance(value, staticmethod) and issubclass(
                        base, torch.autograd.Function
                    ):
                        self._walk(value.__func__)
                        continue
                    self.undo.callback(_set_attribute, base, name, value)
                self._walk(value)

    def _walk(self, value: Any, *, library: bool = False) -> None:
        """Keep a value and what it leads to.

        Args:
            value: any value.
            library: whether an object or a function of a library led here.
        """
        if isinstance(value, PLAIN) or id(value) in self._parts:
            return  # a module of the model has been kept as such
        if {(id(value), library), (id(value), False)} & self._seen:
            return
        if isinstance(value, type):
            # counters that a forward keeps on a class: a copy of the object would share them
            self._walk_class(value)
            return
        self._seen.add((id(value), library))
        if len(self._seen) > MOST_STATE:
            # a model that holds its dataset or its trainer: the walk would take longer than the
            # window
            raise NotRecomputed(
                "the model reaches too many objects to put back what a second call changes"
            )
        if isinstance(value, types.FunctionType):
            # its globals and closures hold state of the forward that no attribute of a module leads
            # to
            self._walk_function(value, library=library)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._keep_array(value)
        elif isinstance(
            value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random
        ):
            # dropout with a generator of its own: `RandomState` has only those of the process
            self.undo.callback(*_state_of(value))
        elif isinstance(value, bytearray | array):
            self.undo.callback(value.__setitem__, slice(None), value[:])
        elif isinstance(value, list | dict | set | deque):
            content = _content(value)
            self.undo.callback(_refill, value, content)
            self._walk_all(
                content.values() if isinstance(content, dict) else content, library=library
            )
            # a subclass of a dict, such as transformers' outputs, has attributes beside its items
            if type(value).__module__ not in ("builtins", "collections"):
                self._walk_object(value, library=library)
        elif isinstance(value, tuple | frozenset):
            self._walk_all(value, library=library)
        elif any(hasattr(type(value), name) for name in _DRAWN_FROM):
            # what it gives is gone: the second call would take the next item from the program
            kind = "an iterator" if hasattr(type(value), "__next__") else "a queue"
            raise NotRecomputed(
                f"the model reads {kind} ({type(value).__name__}), which cannot be put back"
            )
        elif library and isinstance(value, _LOCKS):
            # a pool or a server of a library: to refill it under its threads could stop the program
            raise NotRecomputed(
                "the model reaches an object that threads share, which cannot be put back"
            )
        else:
            self._walk_object(value, library=library)

    def _walk_all(self, values: Iterable[Any], *, library: bool = False) -> None:
        for value in list(values):
            self._walk(value, library=library)

    def _walk_object(self, value: Any, *, library: bool) -> None:
        kind = type(value)
        language = kind.__module__ in _LANGUAGE
        if _is_users_class(kind):
            library = False
        elif not (language or isinstance(value, torch.nn.Module)):
            # torch's objects are left alone: streams, engines and storages cannot be written to
            # from here
            if library or str(kind.__module__).partition(".")[0] in ("torch", "gradcheck_suite"):
                return
            library = True
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._walk(attributes, library=library)
        if language:
            self._walk_all((getattr(value, name, None) for name in _LEADS), library=library)
        self._keep_slots(value, library=library)
        self._walk_class(kind)

    def _keep_slots(self, value: Any, *, library: bool) -> None:
        for base in type(value).__mro__:
            if "__slots__" in vars(base):
                for slot in [
                    each
                    for each in vars(base).values()
                    if isinstance(each, types.MemberDescriptorType)
                ]:
                    held = _held(slot, value)
                    self.undo.callback(_set_slot, slot, value, held)
                    self._walk_all(held, library=library)

    def _walk_function(self, function: types.FunctionType, *, library: bool) -> None:
        users = is_users(function.__code__.co_filename)
        if library and not users:
            return  # what libraries hold among themselves, such as caches of modules, is theirs
        library = not users
        # a recording stand-in: what it records is not put back
        if is_suites(function.__code__.co_filename):
            inner = [cell.cell_contents for cell in function.__closure__ or ()]
            self._walk_all(each for each in inner if isinstance(each, types.FunctionType))
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                self.undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                self._walk(cell.cell_contents, library=library)
        self._walk_all(
            (vars(function), function.__defaults__, function.__kwdefaults__), library=library
        )
        if users:
            self._walk_globals(function)

    def _walk_globals(self, function: types.FunctionType) -> None:
        names = names_in_code(function.__code__)
        scopes = {id(function.__globals__): function.__globals__}
        waiting = list(scopes.values())
        while waiting:
            scope = waiting.pop()
            for name in names - scope.keys():  # a counter that the first call makes
                self.undo.callback(scope.pop, name, None)
            for name in names & scope.keys():
                value = scope[name]
                self.undo.callback(scope.__setitem__, name, value)
                self._walk(value)
                # `helpers.draw()`: the names of a module of the user's that the code may read
                if isinstance(value, types.ModuleType) and is_users(
                    getattr(value, "__file__", None)
                ):
                    waiting += [vars(value)] if id(vars(value)) not in scopes else []
                    scopes[id(vars(value))] = vars(value)

    def _keep_array(self, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(value, np.ndarray):
            if value.flags.writeable:
                self.undo.callback(np.copyto, value, value.copy())
        elif value.numel() > LARGEST_STATE and id(value) not in self._own:
            # a dataset on the module: a copy for each window would take its memory once more
            raise NotRecomputed(
                "the model reaches a large tensor that is no parameter and no buffer of it"
            )
        elif value.layout == torch.strided:
            # the version too: the program's own backward raises if a saved tensor has another one
            version = None if value.is_inference() else value._version
            self.undo.callback(
                _set_tensor,
                value,
                value.data,
                value.data.clone(),
                version,
            )


def _is_users_class(kind: type) -> bool:
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _drop_new_attributes(kind: type, known: frozenset[str]) -> None:
    for name in vars(kind).keys() - known:
        if not name.startswith("__"):
            delattr(kind, name)


def _set_attribute(kind: type, name: str, value: Any) -> None:
    if vars(kind).get(name) is not value:  # members of an `Enum` cannot be set
        setattr(kind, name, value)


def _held(slot: types.MemberDescriptorType, value: Any) -> tuple[Any, ...]:
    """Return what a slot holds, or nothing."""
    try:
        return (slot.__get__(value),)
    except AttributeError:
        return ()


def _set_slot(slot: types.MemberDescriptorType, value: Any, held: tuple[Any, ...]) -> None:
    if held:
        slot.__set__(value, *held)
    elif _held(slot, value):
        slot.__delete__(value)


def names_in_code(code: types.CodeType) -> set[str]:
    """Return the names that a function's code reads or writes, those of functions inside of it too."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(names_in_code, inner))


def _state_of(generator: Any) -> tuple[Any, ...]:
    """Return what sets the state of a generator, and the state."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    return setattr, generator.bit_generator, "state", generator.bit_generator.state


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in which a NaN is equal to itself and 0 is not equal to -0."""
    if tensor.is_complex() or tensor.is_quantized:
        return tensor
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def _set_tensor(
    tensor: torch.Tensor, data: torch.Tensor, values: torch.Tensor, version: int | None
) -> None:
    """Put back a tensor's `.data`, the values in it, and its version, by which the program's
    backward checks it.

    What has not changed is not written to: it may be a file that is mapped to be read.
    """
    if tensor.dtype != data.dtype or not tensor.is_set_to(data):
        tensor.data = data
    if not torch.equal(_bits(data), _bits(values)):
        for dim, stride in enumerate(data.stride()):
            if stride == 0 and data.shape[dim]:  # an expanded tensor cannot be written to
                data = data.narrow(dim, 0, 1)
                values = values.narrow(dim, 0, 1)
        data.copy_(values)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _base_of(container: Any) -> Any:
    """Return the built-in class of a container: a subclass may refuse to be written to, as a frozen
    dict does.
    """
    kinds = OrderedDict, dict, list, set, deque
    if type(container) in kinds:
        return type(container)
    return next(kind for kind in kinds if isinstance(container, kind))


def _content(container: Any) -> Any:
    """Return what a container holds, read without the methods of a subclass.

    transformers' `ACT2FN` makes an object of a class at each access.
    """
    if type(container) is dict:  # a module has three, and a model thousands of these
        return container.copy()
    kind = _base_of(container)
    keys = list(kind.__iter__(container))
    return (
        {key: dict.__getitem__(container, key) for key in keys}
        if isinstance(container, dict)
        else keys
    )


def _refill(container: Any, content: Any) -> None:
    kind = _base_of(container)
    now = _content(container)
    pairs = zip(*(_flat(each) for each in (now, content)), strict=False)
    if len(now) == len(content) and all(a is b for a, b in pairs):
        return  # a thread of the program's may read it at this moment
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, content)


def _flat(content: Any) -> Iterable[Any]:
    return itertools.chain.from_iterable(content.items()) if isinstance(content, dict) else content


@contextlib.contextmanager
def unchanged(
    subject: torch.nn.Module | type, kinds: Iterable[type] = (), values: Iterable[Any] = ()
) -> Iterator[None]:
    """Put back what calls of a module or of a custom function may change: modes, and what its code
    reaches.

    Args:
        subject: a module, or a custom function of autograd.
        kinds: further classes whose methods run, as those of tensors.
        values: what the calls are given.

    Raises:
        NotRecomputed: something of that cannot be put back.
    """
    state = ProgramState(subject, kinds, values)
    try:
        yield
    finally:
        state.undo.run()
