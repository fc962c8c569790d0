"""Calls of modules, recorded so that they can be computed again, and the gradients that follow from them.

The run stays what it is: trained parameters, without their hooks, and buffers are copies, and random numbers, training
modes, frozen parameters and plain attributes are put back. What the modules print is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import random
import sys
import threading
import types
import warnings
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import unserializable_hook

from gradcheck_suite.auditing.places import is_own, is_users
from gradcheck_suite.auditing.samples import Raw, has_values, sample
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from gradcheck_suite.run.functions import Forward as FunctionForward
from gradcheck_suite.run.functions import kinds_of, replaced_forwards

TRANSPARENT = ("DistributedDataParallel", "DataParallel")
"""Wrappers whose inner module is recorded instead: to call them again would start a collective."""


@dataclass(eq=False)
class Forward:
    """One call of a module.

    Attributes:
        module: that was called.
        arguments: flat positional and keyword arguments; tensors are detached and share their storage.
        structure: how `arguments` are put together.
        versions: `_version` of each tensor of `arguments` when the module was called, -1 for other values.
        needs_gradient: whether each of `arguments` required a gradient.
        random: states of the random number generators.
        modes: `training` of each submodule.
        trained: whether each parameter required a gradient.
        autocast: device type, dtype, and whether autocast was on.
        point: fingerprint of the module's parameters.
        compiled: whether the module is compiled.
        outputs: a sample of each output tensor through which a gradient may come.
        scalars: which outputs have no dimension.
    """

    module: torch.nn.Module
    arguments: list[Any]
    structure: Any
    versions: list[int]
    needs_gradient: list[bool]
    random: RandomState
    modes: tuple[bool, ...]
    trained: tuple[bool, ...]
    autocast: tuple[str, torch.dtype, bool]
    point: tuple[Any, ...]
    compiled: bool = False
    outputs: list[Raw] = field(default_factory=list)
    scalars: list[bool] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether an argument was changed in place since the call."""
        return any(
            value._version != version
            for value, version in zip(self.arguments, self.versions, strict=True)
            if isinstance(value, torch.Tensor)
        )


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
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = tuple(torch.cuda.get_rng_state_all()) if used else ()
        return RandomState(torch.get_rng_state(), devices, np.random.get_state(), random.getstate())

    def set(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Put the generators back after work of the suite's own: an import alone may draw, as rich's does."""
    try:
        before = RandomState.now()
    except Exception:  # a GPU on which a kernel has failed
        before = None
    try:
        yield
    finally:
        if before is not None:
            before.set()


def point_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return what changes when something writes to a module's parameters: versions, addresses and a few values."""
    parameters = list(module.parameters())
    sample = [p.detach() for p in parameters[:8] if p.device.type == "cpu" and p.numel() and p.layout == torch.strided]
    values = tuple(float(p.as_strided((), ())) for p in sample)
    return sum(p._version for p in parameters), sum(p.data_ptr() for p in parameters), values


def _autocast(module: torch.nn.Module) -> tuple[str, torch.dtype, bool]:
    device = next((p.device.type for p in module.parameters()), "cpu")
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


class Forwards:
    """Records the calls of modules.

    Args:
        wanted: whether calls are recorded in full, or their mode alone; None for neither.
        receive: called with a call that is recorded in full, the index of an output, and the gradient that reached it.
        ran: called with the id of a module and its mode, when a gradient has reached an output of such a call.
        failed: called with an error of the suite's own.

    Attributes:
        copies: whether inputs are copied, since the program changes them in place.
    """

    def __init__(
        self,
        wanted: Callable[[], bool | None],
        receive: Callable[[Forward, int, torch.Tensor], None],
        ran: Callable[[int, bool], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.copies = False
        self._wanted, self._receive, self._ran, self._failed = wanted, receive, ran, failed
        self._surrounding: torch.nn.Module | None = None
        self._begun: tuple[Any, ...] | None = None
        self._handles: list[Any] = []

    def open(self) -> None:
        """Watch the calls of modules."""
        others = bool(module_hooks._has_any_global_hook())
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        # a compiled module asks for it, and would warn of our hooks (torch/_dynamo/eval_frame.py, no issue known)
        self._asked, module_hooks._has_any_global_hook = module_hooks._has_any_global_hook, lambda: others

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
            # torch 2.13.0 leaves this entry behind (torch/nn/modules/module.py, no issue known)
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        if self._handles:
            module_hooks._has_any_global_hook = self._asked
        self._handles = []

    def reset(self) -> None:
        """Forget a call that has not returned."""
        self._surrounding = self._begun = None

    def _before(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._surrounding not in (None, module):
            return
        if (in_full := self._wanted()) is None:
            return
        if type(module).__name__ in TRANSPARENT or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if not in_full:
            self._surrounding = module
            return
        if not any(p.requires_grad for p in module.parameters()) or not all(map(has_values, module.parameters())):
            return
        try:
            self._surrounding = module
            modes = tuple(part.training for part in module.modules())
            trained = tuple(p.requires_grad for p in module.parameters())
            self._begun = arguments, RandomState.now(), modes, trained, _autocast(module), point_of(module)
        except Exception as error:
            self._failed(error)

    def _after(self, module: torch.nn.Module, _: Any, keywords: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._surrounding:
            return
        begun = self._begun
        self.reset()
        try:
            if begun is not None:
                self._record(module, begun, keywords, output)
            else:
                for tensor in filter(has_values, differentiable(output)):
                    tensor.register_hook(self._hook_of_mode(id(module), module.training))
        except Exception as error:
            self._failed(error)

    def _hook_of_mode(self, module: int, training: bool) -> Callable[[torch.Tensor], None]:
        @unserializable_hook  # type: ignore[untyped-decorator]
        def hook(_: torch.Tensor) -> None:
            try:
                self._ran(module, training)
            except Exception as error:
                self._failed(error)

        return hook

    def _record(self, module: torch.nn.Module, begun: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        arguments, random_state, modes, trained, autocast, point = begun
        values, structure = pytree.tree_flatten((arguments, keywords))
        kept = [self._kept(value) for value in values]
        forward = Forward(
            module=module,
            arguments=kept,
            structure=structure,
            versions=[value._version if isinstance(value, torch.Tensor) else -1 for value in kept],
            needs_gradient=[isinstance(value, torch.Tensor) and value.requires_grad for value in values],
            random=random_state,
            modes=modes,
            trained=trained,
            autocast=autocast,
            point=point,
            compiled=hasattr(module, "_orig_mod"),
        )
        seen = set[int]()
        for index, tensor in enumerate(differentiable(output)):
            forward.outputs.append(sample(tensor, whole=True))
            forward.scalars.append(tensor.dim() == 0)
            if id(tensor) not in seen:  # a tensor that is returned twice receives one gradient
                seen.add(id(tensor))
                tensor.register_hook(self._hook(forward, index))

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone() if self.copies else value.detach()

    def _hook(self, forward: Forward, index: int) -> Callable[[torch.Tensor], None]:
        @unserializable_hook  # type: ignore[untyped-decorator]
        def hook(cotangent: torch.Tensor) -> None:
            try:
                self._receive(forward, index, cotangent.detach())
            except Exception as error:  # autograd would raise it in the program's backward
                self._failed(error)

        return hook


def leaves_of(output: Any) -> list[Any]:
    """Return the leaves of a module's output; those of an object, such as a distribution, are its attributes'."""
    found: list[Any] = []
    for leaf in output if isinstance(output, list) else pytree.tree_leaves(output):
        has_attributes = hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | torch.nn.Module | type)
        found += pytree.tree_leaves(dict(vars(leaf))) if has_attributes else [leaf]
    return found


def is_differentiable(leaf: Any) -> bool:
    """Whether a gradient may come through a leaf of a module's output."""
    return type(leaf) is torch.Tensor and leaf.grad_fn is not None


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output through which a gradient may come."""
    return [leaf for leaf in leaves_of(output) if is_differentiable(leaf)]


# The same calls once more.


Gradients = dict[int, torch.Tensor]
"""The id of a parameter -> a gradient."""

SCALE = 8.0
"""A power of two, by which the gradients of outputs are multiplied and what follows is divided. A backward pass that is
linear gives the same bits."""


@dataclass(frozen=True)
class How:
    """How calls are computed again.

    Attributes:
        modes: `training` of each submodule, in place of the recorded ones.
        hooks: whether the backward hooks of modules run.
        scale: by which the gradients of outputs are multiplied.
        seed: of a relative change of each parameter and input by one unit roundoff; None for no change.
        received: whether the gradients that are given are all that the outputs receive, what comes from other outputs
            included.
    """

    modes: tuple[bool, ...] | None = None
    hooks: bool = False
    scale: float = SCALE
    seed: int | None = None
    received: bool = False


@dataclass
class Replayed:
    """What calls gave when they were computed again.

    Attributes:
        gradients: of the parameters that they reach.
        outputs: the output tensors through which a gradient may come, in the order of the recorded ones.
        functions: classes of custom `torch.autograd.Function`s on the way.
        random: whether random numbers were drawn.
        inside: index of an output -> what it received from the other outputs, where that was asked for.
    """

    gradients: Gradients = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    functions: frozenset[type] = frozenset()
    random: bool = False
    inside: dict[int, torch.Tensor] = field(default_factory=dict)


def functions_of(outputs: Sequence[torch.Tensor]) -> frozenset[type]:
    """Return the classes of custom functions, other than torch's own, in the graph of some tensors."""
    return frozenset(kind for kind in kinds_of(outputs) if not kind.__module__.startswith("torch."))


_PLAIN = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def backward_hooks(module: torch.nn.Module) -> list[str]:
    """Return the names of the submodules that have backward hooks of the user's."""
    return [name or type(part).__name__ for name, part in module.named_modules() if any(vars(part)[h] for h in _HOOKS)]


class NotRecomputed(Exception):
    """Why a window cannot be computed again."""


MOST_STATE = 5000
"""Objects that are looked through before a model is called once more."""
LARGEST_STATE = 1 << 22
"""Elements of a tensor outside of the model's parameters and buffers that is copied to be put back."""
_KEPT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, types.ModuleType)
_DRAWN_FROM = ("__next__", "get_nowait", "recv_bytes")
"""Methods of what gives something else each time and cannot be put back: iterators, queues, connections."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LANGUAGE = ("builtins", "functools", "types")
"""Modules whose objects stand between a name and what the user put there: bound methods, partials, properties."""
_LEADS = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset", "fdel")
"""Attributes through which those objects lead on."""


class _State:
    """What a call of a model may change, put back by `put_back`: what its code and its hooks reach in Python.

    Frozen parameters; trained ones and buffers, which `replay` replaces, where the code has a further reference to
    them. Attributes, slots, globals, class attributes and closures, containers and objects below them, tensors and
    generators of random numbers, also through bound methods and decorators. Of an object or a function of a library its
    own attributes are kept, not those of further objects of libraries below it; torch's objects are left alone. What
    cannot be put back, such as an iterator or a queue, ends it.

    Args:
        subject: a model, or a custom function of autograd.

    Raises:
        NotRecomputed: something cannot be put back.
    """

    def __init__(self, subject: torch.nn.Module | type) -> None:
        parts = list(subject.modules()) if isinstance(subject, torch.nn.Module) else []
        self._undo = contextlib.ExitStack()
        self._parts = {id(part) for part in parts}
        self._own = {id(t) for part in parts for t in (*part._parameters.values(), *part._buffers.values())}
        self._seen: set[tuple[int, bool]] = set()
        for part in parts:
            self._keep_attributes(part)
            self._walk_class(type(part))
            for held in (part._parameters, part._buffers, part._modules):
                self._undo.callback(_refill, held, _content(held))
            self._walk_all(p for p in part._parameters.values() if p is not None and not p.requires_grad)
            for hooks in (part._forward_hooks, part._forward_pre_hooks):
                for hook in list(hooks.values()):
                    self._walk(hook)
        if isinstance(subject, type):
            self._walk_class(subject)

    def put_back(self) -> None:
        """Put everything back, the last thing first; where something cannot be, the rest is and the error is raised."""
        self._undo.close()

    def _keep_attributes(self, part: torch.nn.Module) -> None:
        kept = {name: value for name, value in vars(part).items() if name not in _PLAIN}
        training = part.training

        def undo() -> None:
            part.training = training
            for name in [name for name in vars(part) if name not in _PLAIN]:
                if name not in kept:
                    del vars(part)[name]
            vars(part).update(kept)

        self._undo.callback(undo)
        self._keep_slots(part, library=False)
        self._walk_all(kept.values())

    def _walk_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if (id(base), False) in self._seen or not _is_users_class(base):
                continue
            self._seen.add((id(base), False))
            for name, value in list(vars(base).items()):
                if not isinstance(value, types.FunctionType):
                    if name.startswith("__"):
                        continue
                    self._undo.callback(_set_attribute, base, name, value)
                self._walk(value)

    def _walk(self, value: Any, *, library: bool = False) -> None:
        """Keep a value and what it leads to.

        Args:
            value: any value.
            library: whether an object or a function of a library led here.
        """
        if isinstance(value, _KEPT) or id(value) in self._parts:
            return
        if {(id(value), library), (id(value), False)} & self._seen:
            return
        if isinstance(value, type):
            self._walk_class(value)
            return
        self._seen.add((id(value), library))
        if len(self._seen) > MOST_STATE:
            raise NotRecomputed("the model reaches too many objects to put back what a second call changes")
        if isinstance(value, types.FunctionType):
            self._walk_function(value, library=library)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._keep_array(value)
        elif isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            self._undo.callback(_set_state_of, value, _state_of(value))
        elif isinstance(value, bytearray | array):
            self._undo.callback(value.__setitem__, slice(None), value[:])
        elif isinstance(value, list | dict | set | deque):
            content = _content(value)
            self._undo.callback(_refill, value, content)
            self._walk_all(content.values() if isinstance(content, dict) else content, library=library)
            if type(value).__module__ not in ("builtins", "collections"):
                self._walk_object(value, library=library)
        elif isinstance(value, tuple | frozenset):
            self._walk_all(value, library=library)
        elif any(hasattr(type(value), name) for name in _DRAWN_FROM):
            kind = "an iterator" if hasattr(type(value), "__next__") else "a queue"
            raise NotRecomputed(f"the model reads {kind} ({type(value).__name__}), which cannot be put back")
        elif library and isinstance(value, _LOCKS):
            raise NotRecomputed("the model reaches an object that threads share, which cannot be put back")
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
                for slot in [each for each in vars(base).values() if isinstance(each, types.MemberDescriptorType)]:
                    held = _held(slot, value)
                    self._undo.callback(_set_slot, slot, value, held)
                    self._walk_all(held, library=library)

    def _walk_function(self, function: types.FunctionType, *, library: bool) -> None:
        users = is_users(function.__code__.co_filename)
        if library and not users:
            return
        library = not users
        if is_own(function.__code__.co_filename):  # a recording stand-in: what it records is not put back
            inner = [cell.cell_contents for cell in function.__closure__ or ()]
            self._walk_all(each for each in inner if isinstance(each, types.FunctionType))
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                self._undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                self._walk(cell.cell_contents, library=library)
        self._walk_all((vars(function), function.__defaults__, function.__kwdefaults__), library=library)
        if users:
            self._walk_globals(function)

    def _walk_globals(self, function: types.FunctionType) -> None:
        names, scopes = _names_of(function.__code__), {id(function.__globals__): function.__globals__}
        waiting = list(scopes.values())
        while waiting:
            scope = waiting.pop()
            for name in names & scope.keys():
                value = scope[name]
                self._undo.callback(scope.__setitem__, name, value)
                self._walk(value)
                # `helpers.draw()`: the names of a module of the user's that the code may read
                if isinstance(value, types.ModuleType) and is_users(getattr(value, "__file__", None)):
                    waiting += [vars(value)] if id(vars(value)) not in scopes else []
                    scopes[id(vars(value))] = vars(value)

    def _keep_array(self, value: torch.Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._undo.callback(np.copyto, value, value.copy())
        elif value.numel() > LARGEST_STATE and id(value) not in self._own:
            raise NotRecomputed("the model reaches a large tensor that is no parameter and no buffer of it")
        elif value.layout == torch.strided:
            version = None if value.is_inference() else value._version
            self._undo.callback(_set_tensor, value, value.data, value.data.clone(), version)


def _is_users_class(kind: type) -> bool:
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None))


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


def _names_of(code: types.CodeType) -> set[str]:
    """Return the names that a function's code reads or writes, those of functions inside of it too."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in which a NaN is equal to itself and 0 is not equal to -0."""
    if tensor.is_complex() or tensor.is_quantized:
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _set_tensor(tensor: torch.Tensor, data: torch.Tensor, values: torch.Tensor, version: int | None) -> None:
    """Put back a tensor's `.data`, the values in it, and its version, by which the program's backward checks it.

    What has not changed is not written to: it may be a file that is mapped to be read.
    """
    if tensor.dtype != data.dtype or not tensor.is_set_to(data):
        tensor.data = data
    if not torch.equal(_bits(data), _bits(values)):
        for dim, stride in enumerate(data.stride()):
            if stride == 0 and data.shape[dim]:  # an expanded tensor cannot be written to
                data, values = data.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        data.copy_(values)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _base_of(container: Any) -> Any:
    """Return the built-in class of a container: a subclass may refuse to be written to, as a frozen dict does."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))


def _content(container: Any) -> Any:
    """Return what a container holds, read without the methods of a subclass.

    transformers' `ACT2FN` makes an object of a class at each access.
    """
    kind = _base_of(container)
    keys = list(kind.__iter__(container))
    return {key: dict.__getitem__(container, key) for key in keys} if isinstance(container, dict) else keys


def _refill(container: Any, content: Any) -> None:
    kind, now = _base_of(container), _content(container)
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
def unchanged(subject: torch.nn.Module | type) -> Iterator[None]:
    """Put back what calls of a module or of a custom function may change: modes, and what its code reaches.

    Raises:
        NotRecomputed: something of that cannot be put back.
    """
    state = _State(subject)
    try:
        yield
    finally:
        state.put_back()


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Switch off backward hooks."""
    hooks = [vars(part)[name] for part in module.modules() for name in _HOOKS]
    hooks += [module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks]
    kept = [(each, each.copy()) for each in hooks if each]
    for each, _ in kept:
        each.clear()
    try:
        yield
    finally:
        for each, content in kept:
            each.update(content)


def _nudged(value: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return a tensor whose elements are changed by one unit roundoff up or down."""
    unit = UNIT_ROUNDOFF.get(str(value.dtype).removeprefix("torch."))
    if generator is None or unit is None:
        return value
    # one step of the format for a number in the middle of a binade
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8).to(value.device) * 2 - 1
    return value + signs.to(value.dtype) * (2 * unit) * value


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace parameters and buffers by those with their ids.

    `torch.func.functional_call` would leave its replacements in a submodule that has two names (pytorch#164759).
    """
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for part in module.modules():
            holders: list[dict[str, Any]] = [vars(part)["_parameters"], vars(part)["_buffers"]]
            for holder in holders:
                for name, tensor in list(holder.items()):
                    if id(tensor) in tensors:
                        holder[name] = tensors[id(tensor)]
                        before.append((holder, name, tensor))
        yield
    finally:
        for holder, name, tensor in before:
            holder[name] = tensor


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the user's code prints and warns of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def replay(forward: Forward, arguments: list[Any], cotangents: dict[int, torch.Tensor], how: How) -> Replayed:
    """Compute a call again, and the gradients of the parameters.

    Args:
        forward: the recorded call.
        arguments: flat arguments in place of the recorded ones.
        cotangents: index of an output -> its gradient.
        how: how.

    Raises:
        Exception: whatever the user's module raises.
    """
    module = forward.module
    generator = None if how.seed is None else torch.Generator().manual_seed(how.seed)
    parameters = list(zip(module.parameters(), forward.trained, strict=True))
    real = [p for p, trained in parameters if trained]
    leaves = [_nudged(p.detach().clone(), generator).requires_grad_() for p in real]
    # what has been unfrozen since the call was a constant in it
    constants = [*module.buffers(), *(p for p, trained in parameters if p.requires_grad and not trained)]
    replacing = {id(t): t.detach().clone() for t in constants}
    replacing.update((id(p), leaf) for p, leaf in zip(real, leaves, strict=True))
    values = [
        _nudged(v, generator).detach().requires_grad_(need) if isinstance(v, torch.Tensor) else v
        for v, need in zip(arguments, forward.needs_gradient, strict=True)
    ]
    positional, keywords = pytree.tree_unflatten(values, forward.structure)
    device, dtype, enabled = forward.autocast
    result, seen = Replayed(), list[Any]()

    def receive(index: int, given: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        result.inside[index] = arrived
        return given

    def compute() -> None:
        forward.random.set()
        for each, training in zip(module.modules(), how.modes or forward.modes, strict=True):
            each.training = training
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            module(*positional, **keywords)
        now = RandomState.now()
        states = zip((now.cpu, *now.devices), (forward.random.cpu, *forward.random.devices), strict=True)
        result.random = not all(torch.equal(a, b) for a, b in states)
        outputs = differentiable(seen[-1])
        scaled = [g * how.scale for g in cotangents.values()]
        found = [outputs[index] for index in cotangents]
        if how.received:
            for index, given in zip(cotangents, scaled, strict=True):
                outputs[index].register_hook(functools.partial(receive, index, given))
            scaled = [torch.zeros_like(given) for given in scaled]
        gradients = torch.autograd.grad(found, leaves, scaled, allow_unused=True)
        both = zip(real, gradients, strict=True)
        result.gradients = {id(p): g / how.scale for p, g in both if g is not None}
        result.outputs = [output.detach() for output in outputs]
        result.functions = functions_of(outputs)

    handle = register_module_forward_hook(lambda part, _, output: seen.append(output) if part is module else None)
    hooks = contextlib.nullcontext() if how.hooks else _without_hooks(module)
    try:
        with unchanged(module), hooks, quiet(), torch.enable_grad(), _replaced(module, replacing):
            compute()
    finally:
        handle.remove()
    return result


# Custom functions of the window: is `backward` the derivative of `forward`?
#
# A function is called by itself on the arguments of its first call, in float64 where it takes that. The derivative of
# `forward` along some directions, by central differences of several steps, is held to what `backward` says.
#
# Many functions differ from the derivative on purpose, and these are no faults: one that returns its input (gradient
# reversal, scaling, clipping) and one that passes a gradient where its output is constant or jumps (straight-through
# estimators, rounding, spikes). Elements of the output that a direction does not move are therefore left out, and a
# difference is a fault only where it is `STABLE` times as large as the differences between all step sizes: where
# `forward` is smooth.


LEAST = 1e-3
"""Relative difference of a derivative that is not looked at: a function may compute in float32."""
BY_CHANCE = 0.1
"""The share of a gradient's norm that passes where an output in float32 stands still, by its rounding: 1% of them."""
STABLE = 3.0
"""Least ratio of a fault to the largest difference between the derivatives of two step sizes."""
STEPS = (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Step sizes, relative to the root mean square of the input. Large ones tell smooth functions from rounding ones."""
MOVING = STEPS.index(1e-3)
"""The step that tells which elements of an output are constant."""
STEPS_OF = {torch.float64: STEPS, torch.float32: STEPS[: MOVING + 1]}
LARGEST = 2**23
"""Number of elements of a call's arguments above which it is not judged."""
JITTER = 1e-3
"""Relative distance by which inputs are moved first: recorded ones often lie at kinks, such as the zeros of a ReLU."""
CONSTANT = "it passes a gradient where its output is constant, as a straight-through estimator does"
IDENTITY = "it returns its input and changes the gradient of it"
JUMPS = "its backward is not the derivative of its forward, which jumps or bends near by"
GIVEN = "the forward that makes its class gives it values"
DIRECTIONS = 4
"""Random directions for each input; every other one goes uphill, so that nothing cancels."""


@dataclass(frozen=True)
class FunctionReport:
    """What is known of a custom function.

    Attributes:
        name: of the class.
        fault: what is wrong with `backward`, in words; empty where nothing is, as far as it was judged.
        note: why the function was not judged, or that its gradient is another one on purpose; empty otherwise.
        error: relative difference of the derivative, where there is a fault.
    """

    name: str
    fault: str = ""
    note: str = ""
    error: float = 0.0


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a custom function.

    Attributes:
        kind: its class.
        arguments: a copy of what it was called with.
        random: the random numbers that it drew from.
        by_itself: whether the class is the function whatever its arguments are: one that is made anew in each forward
            may have values from there, which belong to the arguments.
    """

    kind: Any
    arguments: list[Any]
    random: RandomState
    by_itself: bool = True


FunctionKey = type | tuple[str, str, Any]
"""A class of a custom function, or the statement that makes a new one each time: see `statement_of`."""


def statement_of(kind: Any) -> FunctionKey:
    """Return what all classes have that one statement has made, as in the forward of a module: names and code."""
    return kind.__module__, kind.__qualname__, getattr(inspect.unwrap(kind.forward), "__code__", None)


_BARE = frozenset(vars(type("Bare", (torch.autograd.Function,), {})))


def _captured(kind: type) -> list[Any] | None:
    """Return the values that a class has from where it was made; None where some are no plain ones, such as tensors."""
    found: list[Any] = []
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # the class's own name, which is bound when it is made
                    found.append(cell.cell_contents)
            found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        elif name not in _BARE:
            found.append(value)
    found = [value for value in found if value is not kind]
    return found if all(isinstance(value, _KEPT) for value in found) else None


@contextlib.contextmanager
def first_calls(kinds: Set[type]) -> Iterator[dict[FunctionKey, Call]]:
    """Record the first call of each class while this is open: its arguments are copied.

    Where the statement that made one of the classes makes another one meanwhile, the first call of those is recorded.
    """
    found: dict[FunctionKey, Call] = {}
    statements = {statement_of(kind): _captured(kind) for kind in kinds}

    def recording(kind: Any, key: FunctionKey, *, by_itself: bool = True) -> Any:
        def made(forward: FunctionForward, first: int) -> FunctionForward:
            def recorded(*arguments: Any) -> Any:
                if key not in found:
                    given = [_copy(value) for value in arguments[first:]]
                    found[key] = Call(kind, given, RandomState.now(), by_itself)
                return forward(*arguments)

            return recorded

        return made

    with contextlib.ExitStack() as stack:

        def again(kind: type) -> None:
            if (statement := statement_of(kind)) in statements:
                values = _captured(kind)
                by_itself = values is not None and values == statements[statement]
                stack.enter_context(replaced_forwards([(kind, recording(kind, statement, by_itself=by_itself))]))

        stack.enter_context(replaced_forwards((kind, recording(kind, kind)) for kind in kinds))
        stack.enter_context(_each_new_function(again))
        yield found


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
        del function.__init_subclass__


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def judge_function(call: Call) -> FunctionReport:
    """Judge the `backward` of a custom function at one call.

    The random numbers of the process are changed.
    """
    name, reason = call.kind.__name__, ""
    if not call.by_itself:
        return FunctionReport(name, note=f"its backward was not checked: {GIVEN}")
    if (size := sum(v.numel() for v in call.arguments if isinstance(v, torch.Tensor))) > LARGEST:
        return FunctionReport(name, note=f"its backward was not checked: its arguments have {size} elements")
    for dtype in STEPS_OF:
        try:
            with unchanged(call.kind):
                return _judged(call, dtype)
        except NotRecomputed as reason_of_state:
            return FunctionReport(name, note=f"its backward was not checked: {reason_of_state}")
        except Exception as error:  # whatever somebody's function raises on another dtype
            reason = reason or f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return FunctionReport(name, note=f"its backward was not checked, since it cannot be called by itself ({reason})")


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outputs(call: Call, arguments: Sequence[Any], *, grad: bool = False) -> list[torch.Tensor]:
    """Return the floating-point outputs of the function."""
    call.random.set()
    given = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    with torch.set_grad_enabled(grad):
        found = call.kind.apply(*given)
    return [value for value in (found if isinstance(found, tuple) else (found,)) if _is_real(value)]


def _judged(call: Call, dtype: torch.dtype) -> FunctionReport:
    base = [v.detach().to(dtype) if _is_real(v) else v for v in call.arguments]
    wanted = [i for i, v in enumerate(call.arguments) if _is_real(v) and v.requires_grad and v.numel()]
    name, generator = call.kind.__name__, torch.Generator().manual_seed(0)
    if not all(torch.equal(a, b) for a, b in zip(_outputs(call, base), _outputs(call, base), strict=True)):
        return FunctionReport(
            name, note="its backward was not checked, since its forward gives other outputs each time"
        )
    moved = [v + JITTER * _direction(v, generator) if i in wanted else v for i, v in enumerate(base)]
    outputs = _outputs(call, moved)
    if not all(torch.isfinite(output).all() for output in outputs):
        moved = base
    elif dtype == torch.float64 and all(torch.equal(output, output.float().to(output)) for output in outputs):
        raise TypeError("it computes in float32 inside, where the small steps of float64 are lost")
    verdicts = [_of_argument(call, moved, index, STEPS_OF[dtype], generator) for index in wanted]
    return next((v for v in verdicts if v.fault), next((v for v in verdicts if v.note), FunctionReport(name)))


def _direction(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a random direction of the input's size; it keeps the sign of an input whose elements are positive."""
    draws = torch.randn(value.shape, generator=generator, dtype=torch.float64).clamp(-2, 2).to(value)
    if bool((value > 0).all()):
        return draws * value
    return draws * (float(value.double().square().mean().sqrt()) or 1.0)


def _of_argument(
    call: Call, point: list[Any], index: int, steps: tuple[float, ...], generator: torch.Generator
) -> FunctionReport:
    """Judge the derivative with respect to one argument."""
    name, notes, ratios = call.kind.__name__, list[str](), list[float]()
    for number in range(DIRECTIONS):
        line = _Line(call, point, index, _direction(point[index], generator), generator, uphill=bool(number % 2))
        found = line.compared(steps)
        if isinstance(found, str):
            notes.append(found)
        elif found is not None:
            ratios.append(found)
    if len(ratios) < 2:
        return FunctionReport(name, note=notes[0] if notes else "")
    same = max(ratios) - min(ratios) <= LEAST * abs(ratios[0])
    what = f"{ratios[0]:.3g} times the derivative" if same else "not the derivative"
    return FunctionReport(name, f"with respect to argument {index} it is {what}", error=max(abs(r - 1) for r in ratios))


class _Line:
    """A function along a direction of one argument, with a random gradient of its outputs."""

    def __init__(
        self,
        call: Call,
        point: list[Any],
        index: int,
        direction: torch.Tensor,
        generator: torch.Generator,
        *,
        uphill: bool,
    ) -> None:
        self.call, self.point, self.index, self.direction = call, point, index, direction
        self.leaf = point[index].clone().requires_grad_()
        self.outputs = _outputs(call, [self.leaf if i == index else v for i, v in enumerate(point)], grad=True)
        # an output that the function marks as not differentiable has no derivative to compare
        self.cotangents = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) * o.requires_grad for o in self.outputs
        ]
        gradient = self.backward(self.cotangents) if uphill else None
        if gradient is not None:
            # nothing of a sum of products of one sign cancels
            self.direction = torch.where(gradient < 0, -direction.abs(), direction.abs())

    def backward(self, cotangents: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the gradient of the argument for gradients of the outputs."""
        live = [(o, c) for o, c in zip(self.outputs, cotangents, strict=True) if o.requires_grad]
        if not live:
            return None
        tensors, given = zip(*live, strict=True)
        return torch.autograd.grad(tensors, self.leaf, given, allow_unused=True, retain_graph=True)[0]

    def slopes(self, step: float) -> list[torch.Tensor]:
        """Return the central difference of each output."""
        ends = []
        for move in (step, -step):
            values = [v + move * self.direction if i == self.index else v for i, v in enumerate(self.point)]
            ends.append(_outputs(self.call, values))
        return [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]

    def compared(self, steps: tuple[float, ...]) -> float | str | None:
        """Compare `backward` with the derivative.

        Returns:
            what `backward` gives over the derivative where the two differ and `forward` is smooth; words where it
            differs on purpose or may do so; None where they agree.
        """
        slopes = [self.slopes(step) for step in steps]
        moving = [
            # an output that is rounded to less than float64 may stand still at a small step by rounding alone
            each[MOVING] != 0 if each[MOVING].dtype == torch.float64 else torch.stack(each[: MOVING + 1]).any(dim=0)
            for each in zip(*slopes, strict=True)
        ]
        whole = self.backward(self.cotangents)
        still = self.backward([c * ~m for c, m in zip(self.cotangents, moving, strict=True)])
        if whole is None or still is None or not torch.isfinite(whole).all():
            return None
        # in float32 a few elements stand still by chance at every step
        if still.norm() > (LEAST if still.dtype == torch.float64 else BY_CHANCE) * whole.norm():
            return CONSTANT
        cotangents = [c * m for c, m in zip(self.cotangents, moving, strict=True)]
        along = [
            float(sum((c.double() * d.double()).sum() for c, d in zip(cotangents, each, strict=True)))
            for each in slopes
        ]
        terms = (whole - still).double() * self.direction.double()
        got = float(terms.sum())
        # the finest of the two neighbours that agree best; beyond it, rounding
        best = min(range(1, len(along)), key=lambda i: abs(along[i] - along[i - 1]))
        off, right = abs(got - along[best]), along[best]
        if not off > LEAST * max(abs(got), abs(right), float(terms.norm())):
            return None
        if any(o.shape == self.leaf.shape and torch.equal(o, self.leaf) for o in self.outputs):
            return IDENTITY
        if not off > STABLE * max(abs(value - right) for value in along[: best + 1]):
            return JUMPS
        return got / right if right else float("inf")
