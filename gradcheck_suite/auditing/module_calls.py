"""Calls of modules, recorded so that they can be computed again, and the gradients that follow from
them.

The run stays what it is: trained parameters, without their hooks, and buffers are copies, and
random numbers, training modes, frozen parameters and plain attributes are put back. What the
modules print is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradcheck_suite.auditing.checkpointed import GENERATOR, CheckpointWatch
from gradcheck_suite.auditing.modes import Apart, AsBefore, is_of_rows
from gradcheck_suite.auditing.places import current_place
from gradcheck_suite.auditing.program_state import (
    NotRecomputed,
    ProgramState,
    RandomState,
    states_of_devices,
    unchanged,
)
from gradcheck_suite.auditing.repeated_calls import RepeatedCalls
from gradcheck_suite.auditing.samples import (
    OWN,
    BatchedSampler,
    Fingerprint,
    Raw,
    fingerprint,
    has_values,
    is_same_fingerprint,
    sample,
)
from gradcheck_suite.auditing.saved_values import note_call, saved_by_call
from gradcheck_suite.auditing.shared_parameters import can_be_shared, put_back, shared
from gradcheck_suite.auditing.terms import elements, factors_below, is_leaf, live, mark_call
from gradcheck_suite.auditing.unused_calls import CalledAt, UnusedCalls
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF, dtype_name
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.run.functions import ancestors, is_of_program, kinds_of

LAZY = "a lazy module of the model has made its parameters in a call of it"
LENT = "the model is called with other tensors than its parameters at {}"
OF_PYTHON = "the model returns a {}, which computes in Python"
"""Why a call cannot be computed again."""
WINDOW_AGAIN = "the window again"
READ = "what a backward reads and calls again"
"""Names of instruments."""
INPUTS = "inputs"
PARAMETERS = "parameters"
STATE = "state"
"""What may be kept of a call as it was, where a call before it did not give the same again."""

Copies = dict[int, torch.Tensor]
"""The id of a tensor -> a copy of its values."""


@dataclass(frozen=True)
class CallInputs:
    """What a call was computed from, as it was then.

    Attributes:
        parameters: copies of the parameters.
        buffers: copies of the buffers.
        state: what else of the program's state the call may read; None where it is not kept.
        refusal: why that cannot be kept; empty where it can.
    """

    parameters: Copies = field(default_factory=dict)
    buffers: Copies = field(default_factory=dict)
    state: ProgramState | None = None
    refusal: str = ""

    @staticmethod
    def of(module: torch.nn.Module, what: set[str], parameters: Copies | None) -> CallInputs:
        """Keep what is asked for.

        Args:
            module: that is called.
            what: is to be kept.
            parameters: the copies of an earlier call at the same parameters, if any.
        """
        if PARAMETERS not in what:
            parameters = {}
        elif parameters is None:
            parameters = _copies(module.parameters())
        if STATE not in what:
            return CallInputs(parameters)
        try:
            return CallInputs(parameters, _copies(module.buffers()), ProgramState(module))
        except NotRecomputed as reason:
            return CallInputs(parameters, refusal=str(reason))


def _copies(tensors: Iterable[torch.Tensor]) -> Copies:
    return {id(one): one.detach().clone() for one in tensors}


@dataclass(frozen=True)
class AtBackward:
    """What a call had been computed from, as it was when the first gradient came back to it.

    Attributes:
        inputs: a fingerprint of each tensor of the arguments.
        point: a fingerprint of the parameters.
        buffers: the same of the buffers.
        steps: how many steps the run had made.
        arguments: copies of the arguments, where these are other ones than at the call and are kept.
        tensors: the same of the parameters, and of the buffers.
    """

    inputs: list[Fingerprint]
    point: Point
    buffers: Point
    steps: int
    arguments: list[Any] = field(default_factory=list)
    tensors: Copies = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """The arguments of a call as it begins: the call may write to them.

    Attributes:
        values: flat, the positional ones and those by keyword.
        structure: how they are put together.
        is_copied: whether what calls are given is kept.
        copies: of the tensors among `values`, where it is; else empty.
        versions: of each of `values`.
        needs_gradient: whether each required a gradient.
        below: the autograd node of each that did.
    """

    values: list[Any]
    structure: Any
    is_copied: bool
    copies: list[Any]
    versions: list[int]
    needs_gradient: list[bool]
    below: list[Any]

    @staticmethod
    def of(arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, copied: bool) -> Given:
        """Note how arguments are now."""
        values, structure = pytree.tree_flatten((arguments, dict(keywords)))
        return Given(
            values,
            structure,
            copied,
            copies=_detached(values, copy=True) if copied else [],
            versions=[_version_of(value) for value in values],
            needs_gradient=[_needs_gradient(value) for value in values],
            below=_nodes_of(values),
        )

    def with_keywords(self, keywords: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the positional arguments, and those by keyword with others that are known now.

        A hook of the program's may have put others in place of them, and does so again.
        """
        positional, known = pytree.tree_unflatten(self.values, self.structure)
        late = {name: value for name, value in keywords.items() if name not in known}
        return positional, {**known, **late}


def _keywords_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return what a module is given by keyword, in a hook that runs before its call; empty where that
    is not known.

    torch hands keyword arguments to no hook that runs before the calls of all modules: they are
    variables of the function that calls it (`Module._call_impl`; no issue known).
    """
    frame = inspect.currentframe()
    for _ in range(FRAMES_OF_HOOK):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_filename == module_hooks.__file__:
            own = frame.f_locals
            found = own.get("kwargs")
            return found if own.get("self") is module and isinstance(found, dict) else {}
    return {}


FRAMES_OF_HOOK = 6
"""Functions of the suite between a hook on a module and whoever asks."""


def _version_of(value: Any) -> int:
    """Return how often a tensor was written to as torch knows; -1 where nothing is known."""
    is_known = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_known else -1


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _nodes_of(values: Iterable[Any]) -> list[Any]:
    return [
        torch.autograd.graph.get_gradient_edge(value).node
        for value in values
        if _needs_gradient(value)
    ]


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        module: that was called.
        arguments: flat positional and keyword arguments; tensors are detached and share their
            storage, or are copies where inputs are kept.
        structure: how `arguments` are put together.
        given: the arguments themselves, their tensors detached.
        versions: `_version` of each of `arguments` when the call had returned, -1 for what is no
            tensor.
        writes: whether the call has written to each of `given` itself.
        inputs: a fingerprint of each tensor of `given` when the call had returned.
        needs_gradient: whether each of `arguments` required a gradient when the module was called.
        random: states of the random number generators.
        modes: `training` of each submodule.
        trained: whether each parameter required a gradient.
        autocast: device type, dtype, and whether autocast was on.
        point: fingerprint of the module's parameters when the call had returned.
        buffers: the same of its buffers.
        kept: what was kept of its state before.
        on: modes of the program that were on, the innermost first.
        refusal: why it cannot be computed again, where that is known when it has returned; else
            empty.
        outputs: a sample of each output tensor through which a gradient may come.
        scalars: which outputs have no dimension.
        at_backward: how things were at each of its backward passes.
        steps: how many steps the run had made when the module was called.
        own_outputs: references to the outputs, of which the program may have hooked some.
        has_hooked_output: whether it had when the gradient came back.
        passed: index of an output -> the gradient that hooks of the program's on it have let pass.
        packing: the hooks of the program on saved tensors that were on, which pack and unpack.
        bytes_saved: how much memory the call has kept for its backward.
        counted_at: where it was called, as long as its gradient is waited for and none has
            come.
    """

    module: torch.nn.Module
    arguments: list[Any]
    structure: Any
    given: list[Any]
    versions: list[int]
    writes: list[bool]
    inputs: list[Fingerprint]
    needs_gradient: list[bool]
    random: RandomState
    modes: tuple[bool, ...]
    trained: tuple[bool, ...]
    autocast: tuple[str, torch.dtype, bool]
    point: Point
    buffers: Point
    kept: CallInputs = field(default_factory=CallInputs)
    on: list[Any] = field(default_factory=list)
    refusal: str = ""
    outputs: list[Raw] = field(default_factory=list)
    scalars: list[bool] = field(default_factory=list)
    at_backward: list[AtBackward] = field(default_factory=list)
    steps: int = 0
    own_outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    has_hooked_output: bool = False
    passed: dict[int, torch.Tensor] = field(default_factory=dict)
    packing: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    bytes_saved: int = 0
    counted_at: CalledAt | None = None

    @property
    def changed(self) -> bool:
        """Whether torch knows that an argument was changed in place since the call."""
        return [_version_of(value) for value in self.arguments] != self.versions

    @property
    def has_lost_inputs(self) -> bool:
        """Whether the call has written to an argument of which no copy was made before."""
        return self.arguments_are_given and any(self.writes)

    @property
    def watching(self) -> list[Any]:
        """The modes of the program that were on, and are off when it is computed again."""
        return [mode for mode in self.on if not isinstance(mode, DeviceContext)]

    @property
    def is_refilled(self) -> bool:
        """Whether an argument has other values now than at the call, in which it is not kept."""
        return self.arguments_are_given and not _are_same(self.inputs, _fingerprints(self.given))

    @property
    def arguments_are_given(self) -> bool:
        """Whether `arguments` share the memory of what the program has given."""
        return all(a is b for a, b in zip(self.arguments, self.given, strict=True))

    @property
    def was_refilled(self) -> bool:
        """Whether an argument had other values when its gradient came back than at the call."""
        return any(not _are_same(self.inputs, then.inputs) for then in self.at_backward)

    @property
    def was_moved(self) -> bool:
        """Whether a parameter had other values when its gradient came back than at the call."""
        return any(self.point != then.point for then in self.at_backward)

    @property
    def has_written_buffers(self) -> bool:
        """Whether a buffer had other values when its gradient came back than after the call."""
        return any(self.buffers != then.buffers for then in self.at_backward)

    @property
    def is_of_before_a_step(self) -> bool:
        """Whether an optimizer has stepped between the call and its backward."""
        return any(self.steps != then.steps for then in self.at_backward)

    def note_backward(self, steps: int) -> None:
        """Note how things are when a pass begins to compute the call's gradient, after some steps."""
        # one hook is the suite's own
        outputs = [of() for of in self.own_outputs]
        self.has_hooked_output |= any(
            one is not None and len(one._backward_hooks or ()) > 1 for one in outputs
        )
        inputs = _fingerprints(self.given)
        point = point_of(self.module.parameters())
        buffers = point_of(self.module.buffers())
        arguments = list[Any]()
        tensors = Copies()
        if not self.arguments_are_given and not _are_same(self.inputs, inputs):
            arguments = [_copy_of(value) for value in self.given]
        if self.kept.parameters and point != self.point:
            tensors |= _copies(self.module.parameters())
        if self.kept.buffers and buffers != self.buffers:
            tensors |= _copies(self.module.buffers())
        self.at_backward.append(
            AtBackward(
                inputs,
                point,
                buffers,
                steps,
                arguments,
                tensors,
            )
        )


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _fingerprints(values: Iterable[Any]) -> list[Fingerprint]:
    return [fingerprint(value) for value in values if isinstance(value, torch.Tensor)]


def _are_same(then: Sequence[Fingerprint], now: Sequence[Fingerprint]) -> bool:
    return all(map(is_same_fingerprint, then, now))


Point = tuple[Any, ...]
"""A fingerprint of parameters: their versions and, where they lie in memory, a checksum of some of
their elements."""


def point_of(tensors: Iterable[torch.Tensor]) -> Point:
    """Return what changes when something writes to parameters or buffers, also through `.data`,
    which no version tells of.
    """
    # a sparse or nested parameter has no address of its own
    own = list(tensors)
    return tuple(map(_version_of, own)), tuple(BatchedSampler().marks(own))


def _autocast(module: torch.nn.Module) -> tuple[str, torch.dtype, bool]:
    device = next((p.device.type for p in module.parameters()), "cpu")
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


class ModuleCalls:
    """Records the calls of modules.

    Args:
        wanted: whether calls are recorded in full, or their mode alone; None for neither.
        receive: called with a call that is recorded in full, the index of an output, and the
            gradient that reached it.
        ran: called with the id of a module, its mode, and the gradient that has reached an output
            of such a call.
        failed: called with the name of an instrument and an error of the suite's own.
        steps: returns how many steps the run has made.

    Attributes:
        keeps: what is kept of a call as it was, since a call did not give the same again without:
            `INPUTS`, `PARAMETERS`, `STATE`.
        functions: classes of custom functions in the graphs of recorded calls.
        repeated: the calls of this window, by which those of its backward are known to be the same.
        checkpoints: what those of torch compute again.
        unused: the calls that no backward pass has reached.
        notes: what recorded calls have shown -> in how many of them.
    """

    def __init__(
        self,
        wanted: Callable[[], bool | None],
        receive: Callable[[ModuleCall, int, torch.Tensor], None],
        ran: Callable[[int, bool, torch.Tensor], None],
        failed: Callable[[str, Exception], None],
        steps: Callable[[], int],
    ) -> None:
        self._steps = steps
        self.keeps: set[str] = set()
        self.functions: set[type] = set()
        self._looked_at: set[tuple[int, bool]] = set()
        self.repeated = RepeatedCalls()
        self.unused = UnusedCalls()
        self.notes = Counter[Occurrence]()
        self._constants: dict[tuple[int, str], str | None] = {}
        self.checkpoints = CheckpointWatch(
            self._compares_checkpoints, self.repeated.around, functools.partial(self._try, READ)
        )
        self._is_full = False
        self._kept_at: tuple[int, Point] | None = None
        self._last_kept: weakref.ref[CallInputs] | None = None
        self._wanted = wanted
        self._receive = receive
        self._ran = ran
        self._failed = failed
        self._surrounding: torch.nn.Module | None = None
        self._outermost: torch.nn.Module | None = None
        self._without_gradient: torch.nn.Module | None = None
        self._below_outermost = list[Any]()
        self._modes: list[Any] = []
        self._off = set[str]()
        self._begun: tuple[Given, Callable[..., ModuleCall]] | None = None
        self._handles: list[Any] = []

    def open(self) -> None:
        """Watch the calls of modules."""
        others = bool(module_hooks._has_any_global_hook())
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        # a compiled module asks for it, and would warn of our hooks (torch/_dynamo/eval_frame.py,
        # no issue known)
        self._asked = module_hooks._has_any_global_hook
        module_hooks._has_any_global_hook = lambda: others
        self.checkpoints.open()

    def close(self) -> None:
        """Stop watching, and forget a call that has not returned."""
        self.checkpoints.close()
        for handle in self._handles:
            handle.remove()
            # torch 2.13.0 leaves this entry behind (torch/nn/modules/module.py, no issue known)
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        if self._handles:
            module_hooks._has_any_global_hook = self._asked
        self._handles = []
        self._surrounding = self._outermost = self._begun = self._without_gradient = None

    def _before(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        in_full = self._wanted() if self._surrounding is None else self._is_full
        self._is_full = in_full is True
        if self._is_full:
            self._try(READ, self._note_begin, module, arguments)
        if in_full is None or self._surrounding not in (None, module):
            return
        # their inner module is recorded instead: to call them again would start a collective
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            return
        if (
            torch._C._current_graph_task_id() != -1
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return
        if not torch.is_grad_enabled():
            if in_full and self._without_gradient is None:
                self._without_gradient = module
                self._try(READ, self._count, module, self._steps())
            return
        if not in_full:
            self._surrounding = module
            return
        self._try(WINDOW_AGAIN, self._begin, module, arguments)

    def _try(self, instrument: str, work: Callable[..., object], *arguments: Any) -> None:
        """Let an instrument work, which no mode of the program sees and which raises nothing into it.

        One that has failed is off from then on, and it is said.
        """
        if instrument in self._off:
            return
        try:
            with Apart() as apart:
                self._modes = apart.modes
                work(*arguments)
        except Exception as error:
            self._off.add(instrument)
            self._failed(instrument, error)

    def _note_begin(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note what tells, when a call begins, whether a backward repeats it and reads what it saved."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if torch._C._current_graph_task_id() == -1:
            self.repeated.begin(module, arguments)
        elif torch.is_grad_enabled():
            self.repeated.enter(module, arguments)
        if self._outermost is None and _is_in_program():
            self._outermost = module
            self._below_outermost = _nodes_of(pytree.tree_leaves(arguments))

    def _count(self, module: torch.nn.Module, steps: int) -> CalledAt | None:
        """Count a call of a module that trains; return it where its gradient is asked for."""
        if not module.training or not any(p.requires_grad for p in module.parameters()):
            return None
        called = CalledAt(id(module), current_place())
        return called if self.unused.made(called, steps) else None

    def _begin(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        parameters = list(module.parameters())
        if not any(p.requires_grad for p in parameters) or not all(map(has_values, parameters)):
            return
        self._surrounding = module
        made = functools.partial(
            ModuleCall,
            module=module,
            random=RandomState.now(),
            modes=tuple(part.training for part in module.modules()),
            trained=tuple(p.requires_grad for p in parameters),
            autocast=_autocast(module),
            kept=self._kept_of(module),
            on=self._modes,
            refusal=LAZY if any(map(is_lazy, parameters)) else "",
            steps=self._steps(),
            packing=torch._C._autograd._top_saved_tensors_default_hooks(False),
        )
        # what a call writes to where no version tells shows as other outputs, as a state does
        copied = bool(self.keeps & {INPUTS, STATE})
        self._begun = Given.of(arguments, _keywords_of(module), copied=copied), made

    def _kept_of(self, module: torch.nn.Module) -> CallInputs:
        """Keep of a call what is asked for; calls at the same parameters share the copies of these."""
        if not self.keeps:
            return CallInputs()
        at = (id(module), point_of(module.parameters()))
        last = self._last_kept and self._last_kept()
        kept = CallInputs.of(
            module, self.keeps, last.parameters if last and at == self._kept_at else None
        )
        self._kept_at = at
        self._last_kept = weakref.ref(kept)
        return kept

    def _after(
        self,
        module: torch.nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any,
    ) -> None:
        if torch.compiler.is_compiling():
            return
        if self._is_full:
            self._try(READ, self._note_end, module, arguments, keywords, output)
        if module is self._without_gradient:
            self._without_gradient = None
        if module is not self._surrounding:
            return
        begun = self._begun
        self._surrounding = self._begun = None
        self._try(WINDOW_AGAIN, self._end, module, begun, keywords, output)

    def _note_end(
        self,
        module: torch.nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any,
    ) -> None:
        """Note what a call has given and saved."""
        self._note_outcome(module, (arguments, keywords), output)
        if module is not self._outermost:
            return
        self._outermost = None
        below = [*self._below_outermost, *_nodes_of(pytree.tree_leaves(keywords))]
        self._below_outermost = []
        inputs = pytree.tree_leaves((arguments, keywords))
        note_call(module, inputs, differentiable(output), below)

    def _end(
        self,
        module: torch.nn.Module,
        begun: tuple[Given, Callable[..., ModuleCall]] | None,
        keywords: dict[str, Any],
        output: Any,
    ) -> None:
        """Record a call that has returned, or listen for what its outputs receive."""
        if begun is not None:
            given, made = begun
            self._record(module, made, given, keywords, output)
            return
        for tensor in filter(has_values, differentiable(output)):
            tensor.register_hook(self._hook(self._ran, id(module), module.training))

    def _note_outcome(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        """Note what a call of a module gives, and compare it where a backward calls it for a
        gradient.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if torch._C._current_graph_task_id() == -1:
            self.repeated.note(module, given, output)
        elif torch.is_grad_enabled() and differentiable(output):
            self.repeated.compare(module, given, output)

    def _compares_checkpoints(self) -> bool:
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        return self._wanted() is True and not is_transformed and not torch.compiler.is_compiling()

    def pass_begins(self) -> None:
        """Note from which random numbers a backward pass may draw."""
        if torch._C._current_graph_task_id() == -1:
            self._try(READ, self.repeated.pass_begins)

    def forget_calls(self) -> None:
        """Forget the calls of a window that is over."""
        self.repeated.forget()
        self.checkpoints.forget()
        self._outermost = self._without_gradient = None  # of a call that has raised

    def _hook(self, told: Callable[..., None], *about: Any) -> Callable[[torch.Tensor], None]:
        """Return a hook that tells of the gradient of an output, and raises nothing into the
        program's backward.
        """

        @unserializable_hook  # type: ignore[untyped-decorator]
        def hook(cotangent: torch.Tensor | None) -> None:
            try:
                # a function of one's own may give its input no gradient
                if cotangent is None or is_of_rows(cotangent):
                    return
                with Apart():
                    told(*about, cotangent.detach())
            except Exception as error:
                self._failed(WINDOW_AGAIN, error)

        return hook

    def _record(
        self,
        module: torch.nn.Module,
        made: Callable[..., ModuleCall],
        given: Given,
        keywords: dict[str, Any],
        output: Any,
    ) -> None:
        values, structure = pytree.tree_flatten(given.with_keywords(keywords))
        others = values[len(given.values) :]
        own = _detached(values, copy=False)
        kept = [*given.copies, *_detached(others, copy=True)] if given.is_copied else own
        now = [_version_of(value) for value in given.values]
        writes = [one != then for one, then in zip(now, given.versions, strict=True)]
        forward = made(
            arguments=kept,
            structure=structure,
            given=own,
            inputs=_fingerprints(own),
            point=point_of(module.parameters()),
            buffers=point_of(module.buffers()),
            versions=[_version_of(value) for value in kept],
            writes=[*writes, *(False for _ in others)],
            needs_gradient=[*given.needs_gradient, *map(_needs_gradient, others)],
        )
        if any(not p.is_leaf for p in module.parameters()):
            forward.refusal = LENT.format(current_place().line)
        seen = set[int]()
        forward.counted_at = self._count(module, forward.steps)
        if (once := (id(module), module.training)) not in self._looked_at:
            self._looked_at.add(once)
            self.functions |= set(filter(is_of_program, kinds_of(differentiable(output))))
        below = [*given.below, *_nodes_of(others)]
        saved = saved_by_call(module, differentiable(output), below)
        forward.bytes_saved = saved.size
        for name, line in saved.constants.items():
            # nodes keep their stacks in the first windows alone
            where = self._constants.setdefault((id(module), name), line)
            said = (
                f"a call of {type(module).__name__} computes with {name} as a constant here, as with"
                " its `.data`: no gradient comes to it from there"
            )
            self.notes[finding("parameter-as-constant", said, where)] += 1
        mark_call(differentiable(output), below)
        for tensor in filter(_computes_in_python, leaves_of(output)):
            forward.refusal = OF_PYTHON.format(type(tensor).__name__)
            tensor.register_hook(self._hook(self._receive, forward, -1))
        for index, tensor in enumerate(differentiable(output)):
            forward.outputs.append(sample(tensor, whole=True))
            forward.scalars.append(tensor.dim() == 0)
            forward.own_outputs.append(weakref.ref(tensor))
            node: Any = tensor.grad_fn
            node.register_prehook(functools.partial(_let_pass, forward, index, tensor.output_nr))
            if id(tensor) not in seen:  # a tensor that is returned twice receives one gradient
                seen.add(id(tensor))
                tensor.register_hook(self._hook(self._reach, forward, index))

    def _reach(self, forward: ModuleCall, index: int, cotangent: torch.Tensor) -> None:
        """Take the gradient of an output of a call."""
        if forward.counted_at is not None:
            self.unused.reached(forward.counted_at, forward.steps)
            forward.counted_at = None
        self._receive(forward, index, cotangent)


def _let_pass(
    forward: ModuleCall, index: int, output: int, gradients: Sequence[torch.Tensor | None]
) -> None:
    """Keep what hooks of the program's on an output have let pass: those of its node come later."""
    if forward.has_hooked_output and (given := gradients[output]) is not None:
        forward.passed[index] = given


def _detached(values: Sequence[Any], *, copy: bool) -> list[Any]:
    """Return tensors as ones of their classes that have no graph, other values as they are.

    A tensor that is given twice stays one: a call that writes to it writes to both.
    """
    made = {
        id(value): _of_class(value, value.detach().clone() if copy else value.detach())
        for value in values
        if isinstance(value, torch.Tensor)
    }
    return [made.get(id(value), value) for value in values]


def _of_class(like: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return what was computed from a tensor of a subclass, which did not see it, as one of these."""
    if type(found) is type(like) or type(like) in OWN:
        return found
    one = found.as_subclass(type(like))
    vars(one).update(vars(like))
    return one


def leaves_of(output: Any) -> list[Any]:
    """Return the leaves of a module's output.

    Those of an object, such as a distribution, are its attributes'.
    """
    found: list[Any] = []
    leaves = output if isinstance(output, list) else pytree.tree_leaves(output)
    for leaf in leaves:
        has_attributes = hasattr(leaf, "__dict__") and not isinstance(
            leaf, torch.Tensor | torch.nn.Module | type
        )
        found += pytree.tree_leaves(dict(vars(leaf))) if has_attributes else [leaf]
    return found


def is_differentiable(leaf: Any) -> bool:
    """Whether a gradient may come through a leaf of a module's output."""
    is_one = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    return is_one and not _computes_in_python(leaf)


def _computes_in_python(leaf: Any) -> bool:
    """Whether a leaf is a tensor through which a gradient may come, and which has no memory of its
    own, as a distributed or a jagged one.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
        return False
    return type(leaf).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output through which a gradient may come."""
    return [leaf for leaf in leaves_of(output) if is_differentiable(leaf)]


# The same calls once more.


Gradients = dict[int, torch.Tensor]
"""The id of a parameter -> a gradient."""


@dataclass(frozen=True)
class ReplayOptions:
    """How calls are computed again.

    Attributes:
        hooks: whether the backward hooks of modules run.
        scale: by which the gradients of outputs are multiplied and what follows is divided: a power
            of two, with which a backward pass that is linear gives the same bits.
        seed: of a relative change of each parameter and input by one unit roundoff; None for no
            change.
        received: whether the gradients that are given are all that the outputs receive, what comes
            from other outputs included.
        own: whether the outputs receive zeros: what arrives is the own gradient of custom
            functions.
        forward_only: whether no gradient is computed.
        marked: whether what each module returns is noted.
        own_parameters: whether the parameters are the program's own, and no copies.
        as_it_was_at_backward: whether what the program has written to parameters and arguments
            between a call and its backward is written here, too.
        unhooked: whether the hooks that the forward sets on tensors are left out.
        packed: whether the program's hooks pack and unpack what is saved.
        saved: `CHECKED` to see whether the forward writes to what it has saved, `COPIED` to save
            copies; None to do neither.
    """

    hooks: bool = False
    scale: float = 8.0
    seed: int | None = None
    received: bool = False
    own: bool = False
    forward_only: bool = False
    marked: bool = False
    own_parameters: bool = False
    as_it_was_at_backward: bool = False
    unhooked: bool = False
    packed: bool = False
    saved: str | None = None


CHECKED = "checked"
COPIED = "copied"


class SavedTensors:
    """What is saved in a forward, with what it was then."""

    def __init__(self) -> None:
        self._saved: list[tuple[torch.Tensor, Fingerprint]] = []

    def watched(self, how: str | None) -> contextlib.AbstractContextManager[Any]:
        """Note, or copy, what is saved in a block."""
        if how is None:
            return contextlib.nullcontext()
        return saved_tensors_hooks(self._noted if how == CHECKED else _copied, lambda one: one)

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        # what a node has saved of its own output would hold the node, which holds it
        one = tensor.detach()
        self._saved.append((one, fingerprint(one)))
        return one

    @property
    def are_rewritten(self) -> bool:
        """Whether one of them has other values now."""
        return any(not is_same_fingerprint(then, fingerprint(one)) for one, then in self._saved)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


ReceiveGradient = Callable[[int, torch.Tensor], None]
"""Takes the id of a parameter and its gradient."""


@dataclass
class ReplayResult:
    """What calls gave when they were computed again.

    Attributes:
        gradients: of the parameters that they reach.
        outputs: the output tensors through which a gradient may come, in the order of the recorded
            ones.
        functions: classes of custom `torch.autograd.Function`s on the way.
        random: whether random numbers were drawn.
        inside: index of an output -> what it received from the other outputs, where that was asked
            for.
        injected: losses of one element into which custom functions put a gradient of their own.
        marks: the modules that were called in the forward, in order, with fingerprints of what each
            has returned, where that was asked for.
        checkpoints: that ran in the forward.
        hooked: the lines at which the forward has set hooks on tensors.
        rewrites: whether the forward writes to what it has saved, where that was asked for.
    """

    gradients: Gradients = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    functions: frozenset[type] = frozenset()
    random: bool = False
    inside: dict[int, torch.Tensor] = field(default_factory=dict)
    injected: list[Injected] = field(default_factory=list)
    marks: list[tuple[str, list[Fingerprint]]] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints())
    hooked: list[str] = field(default_factory=list)
    rewrites: bool = False


@dataclass
class Checkpoints:
    """The checkpoints of torch that ran in a call.

    Attributes:
        number: of those that compute again by hooks on what is saved.
        reentrant: of those that start a backward of their own.
    """

    number: int = 0
    reentrant: int = 0


@dataclass
class Injected:
    """A loss that is an argument of a custom function, which may put a gradient of its own into it.

    Attributes:
        factors: the numbers that the loss is multiplied by.
        is_mean: whether it is a mean over the items of a micro-batch.
        weight: that it received.
    """

    factors: list[float]
    is_mean: bool
    weight: float = 0.0


def _injected(outputs: Sequence[torch.Tensor]) -> Iterator[Injected]:
    """Yield the losses that custom functions take, with a hook that sees what they receive."""
    of_functions = (node for node in ancestors(outputs) if hasattr(node, "_forward_cls"))
    for node in of_functions:
        for below, index in live(node):
            if elements(below, index) == 1 and not is_leaf(below):
                one = Injected(*factors_below(below))
                below.register_prehook(functools.partial(_receive, one, index))
                yield one


def _receive(one: Injected, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
    if (given := gradients[index]) is not None:
        one.weight += float(given)


_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def backward_hooks(module: torch.nn.Module) -> list[str]:
    """Return the names of the submodules that have backward hooks of the user's."""
    return [
        name or type(part).__name__
        for name, part in module.named_modules()
        if any(vars(part)[h] for h in _HOOKS)
    ]


def _without_hooks(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Switch off backward hooks."""
    hooks: list[Any] = [
        module_hooks._global_backward_hooks,
        module_hooks._global_backward_pre_hooks,
    ]
    for part in module.modules():
        hooks += [vars(part)[name] for name in _HOOKS]
    return _emptied(hooks)


def _without_watchers() -> contextlib.AbstractContextManager[None]:
    """Switch off forward hooks of all modules, which torch has for profilers and counters."""
    return _emptied([module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks])


@contextlib.contextmanager
def _emptied(hooks: Sequence[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for each in filter(None, hooks):
            undo.callback(each.update, each.copy())
            each.clear()
        yield


def _nudged(
    value: torch.Tensor, generator: torch.Generator | None, lowered: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor whose elements are changed by one unit roundoff up or down.

    Args:
        value: the tensor.
        generator: of the signs; None for no change.
        lowered: the dtype to which autocast rounds it; None for none.
    """
    units = [UNIT_ROUNDOFF.get(dtype_name(each)) for each in (value.dtype.to_real(), lowered)]
    unit = max((one for one in units if one is not None), default=None) if units[0] else None
    # a nested tensor has no shape, and one of compressed rows no product with signs
    if generator is None or unit is None or value.is_nested or value.layout != torch.strided:
        return value
    # one step of the format for a number in the middle of a binade
    signs = (
        torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8).to(value.device) * 2
        - 1
    )
    return value + signs.to(value.dtype) * (2 * unit) * value


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace parameters and buffers by those with their ids.

    `torch.func.functional_call` would leave its replacements in a submodule that has two names
    (pytorch#164759).
    """
    with contextlib.ExitStack() as undo:
        for part in module.modules():
            for holder in (vars(part)["_parameters"], vars(part)["_buffers"]):
                for name, tensor in list(holder.items()):
                    if id(tensor) in tensors:
                        undo.callback(holder.__setitem__, name, tensor)
                        holder[name] = tensors[id(tensor)]
        yield


def _is_like(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    ways = [(t.dtype, t.device, t.shape) for t in (parameter, gradient) if not t.is_nested]
    return len(ways) == 2 and ways[0] == ways[1]


@contextlib.contextmanager
def without_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the program's gradients away for a while: what is called may add to a `.grad`."""
    own = [(p, p.grad) for p in parameters if p.is_leaf]
    # torch takes back only what is like its parameter
    kept = [(p, g) for p, g in own if g is not None and _is_like(p, g)]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in kept:
            p.grad = gradient


@contextlib.contextmanager
def discarded_output() -> Iterator[None]:
    """Drop what the user's code prints and warns of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_in_program() -> bool:
    """Return whether a forward runs whose graph goes backward later: no part of a backward."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _generators() -> bytes:
    """Return the states of torch's generators."""
    # at each call of a module: those of numpy and of Python take ten times as long to read
    states = [torch.get_rng_state(), *states_of_devices()]
    return b"".join(each.numpy().tobytes() for each in states)


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Compile nothing, and use nothing that is: with other parameters, Dynamo would compile the
    model once more.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    # a step in a compiled function, where no stance can be set
    before = dynamo.set_eval_frame(None)
    try:
        # what a checkpoint computes again runs to its end, so that hooks see it
        with torch.compiler.set_stance("force_eager"), set_checkpoint_early_stop(False):
            yield
    finally:
        dynamo.set_eval_frame(before)


@contextlib.contextmanager
def _watched_checkpoints(seen: Checkpoints) -> Iterator[None]:
    """Count checkpoints, and let reentrant ones keep what the forward has computed: their backward
    refuses to run inside of `torch.autograd.grad`.
    """
    plain: Any = getattr(checkpoints, GENERATOR, None)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        seen.number += 1
        yield from plain(*args, **kwargs)

    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        seen.reentrant += 1
        return function(*args)

    with contextlib.ExitStack() as stack:
        if plain is not None:
            stack.enter_context(mock.patch.object(checkpoints, GENERATOR, generator))
        if hasattr(checkpoints, "CheckpointFunction"):
            own = checkpoints.CheckpointFunction
            stack.enter_context(mock.patch.object(own, "apply", staticmethod(apply)))
        yield


@contextlib.contextmanager
def _watched_hooks(lines: list[str], *, unhooked: bool) -> Iterator[None]:
    """Note where hooks are set on tensors, and leave them out where that is asked for."""
    plain = torch.Tensor.register_hook

    def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        lines.append(current_place().line)
        return RemovableHandle(OrderedDict()) if unhooked else plain(tensor, hook)

    with mock.patch.object(torch.Tensor, "register_hook", register):
        yield


def has_room(module: torch.nn.Module) -> bool:
    """Return whether there is memory for what checkpoints throw away."""
    return all(
        4 * torch.cuda.max_memory_allocated(one)
        < torch.cuda.get_device_properties(one).total_memory
        for one in _devices_of(module)
    )


def peak_memory(module: torch.nn.Module) -> int:
    """Return the most bytes that the program has had so far where a module lies: on its devices, else
    in the process; 0 where the system does not tell.
    """
    devices = _devices_of(module)
    if devices:
        return sum(map(torch.cuda.max_memory_allocated, devices))
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _devices_of(module: torch.nn.Module) -> set[torch.device]:
    return {p.device for p in module.parameters() if p.is_cuda}


def replay(
    forward: ModuleCall,
    arguments: list[Any],
    cotangents: dict[int, torch.Tensor],
    how: ReplayOptions,
    receive: ReceiveGradient | None = None,
) -> ReplayResult:
    """Compute a call again, and the gradients of the parameters.

    Args:
        forward: the recorded call.
        arguments: flat arguments in place of the recorded ones.
        cotangents: index of an output -> its gradient.
        how: how.
        receive: called with the gradient of each parameter as soon as it is known, which is let go
            of then. Without it all of them are in the result.

    Raises:
        Exception: whatever the user's module raises.
    """
    module = forward.module
    if any(given.dtype == torch.float16 for given in cotangents.values()):
        how = replace(how, scale=1.0)  # a larger number may overflow
    device, dtype, enabled = forward.autocast
    watched = _Watched(module, marked=how.marked)
    hooks = contextlib.nullcontext() if how.hooks else _without_hooks(module)
    kinds = {type(v) for v in arguments if isinstance(v, torch.Tensor)}
    with (
        _without_watchers(),
        watched,
        unchanged(module, kinds),
        discarded_output(),
        torch.enable_grad(),
        contextlib.ExitStack() as stack,
    ):
        if forward.kept.state is not None:
            forward.kept.state.undo.run()
        stack.enter_context(hooks)
        made = _Replacements.of(forward, arguments, how)
        stack.enter_context(_replaced(module, made.tensors))
        stack.enter_context(put_back(made.given))
        stack.enter_context(_eagerly())
        seen = Checkpoints()
        if has_room(module):
            stack.enter_context(_watched_checkpoints(seen))
        stack.enter_context(AsBefore(forward.on))
        positional, keywords = pytree.tree_unflatten(made.arguments, forward.structure)
        forward.random.set()
        watched.states.add(_generators())
        for each, training in zip(module.modules(), forward.modes, strict=True):
            each.training = training
        hooked = list[str]()
        if how.packed and forward.packing is not None:
            stack.enter_context(saved_tensors_hooks(*forward.packing))
        saved = SavedTensors()
        stack.enter_context(saved.watched(how.saved))
        with (
            torch.autocast(device, dtype=dtype, enabled=enabled),
            _watched_hooks(hooked, unhooked=how.unhooked),
        ):
            module(*positional, **keywords)
        result = ReplayResult(
            random=len(watched.states) > 1,
            marks=watched.marks,
            checkpoints=seen,
            hooked=hooked,
            rewrites=saved.are_rewritten,
        )
        outputs = differentiable(watched.seen[-1])
        result.outputs = [output.detach() for output in outputs]
        if how.forward_only:
            return result
        if how.as_it_was_at_backward:
            made.write(forward.at_backward)
        _differentiate(result, outputs, cotangents, made, how, receive)
    return result


class _Watched:
    """Watches the calls of modules while it is open.

    Attributes:
        seen: what the outermost module has returned.
        states: of the random number generators after each call in the forward.
        marks: the class of each module that was called in the forward, in order, with a fingerprint
            of what it has returned.
    """

    def __init__(self, module: torch.nn.Module, *, marked: bool) -> None:
        self.seen = list[Any]()
        self.states = set[bytes]()
        self.marks = list[tuple[str, list[Fingerprint]]]()
        self._module = module
        self._marked = marked
        self._handles: list[Any] = []
        self._names = {id(part): name for name, part in module.named_modules() if name}

    def _see(self, part: torch.nn.Module, _: Any, output: Any) -> None:
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward:
            self.states.add(_generators())
        if in_forward and self._marked:
            kind = type(part).__name__
            name = self._names.get(id(part))
            self.marks.append(
                (f"{name} ({kind})" if name else kind, _fingerprints(leaves_of(output)))
            )
        if part is self._module:
            self.seen.append(output)

    def __enter__(self) -> None:
        self._handles = [
            register_module_forward_hook(self._see),
        ]

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


def _values(
    arguments: Sequence[Any],
    needs_gradient: Sequence[bool],
    generator: torch.Generator | None,
    unit: torch.dtype | None,
) -> list[Any]:
    """Return the arguments of a second call: copies, since a module may write to what it is given.

    A tensor that is given twice is one here, too.
    """
    made = dict[int, torch.Tensor]()
    for value, need in zip(arguments, needs_gradient, strict=True):
        if isinstance(value, torch.Tensor) and id(value) not in made:
            copy = _nudged(value, generator, unit).detach().clone()
            leaf = _of_class(value, copy).requires_grad_(need)
            # what comes from a layer before is no leaf, which nothing may write to in place
            made[id(value)] = leaf.clone() if need else leaf
    return [made.get(id(value), value) for value in arguments]


@dataclass
class _Replacements:
    """What stands in place of the program's own tensors.

    Attributes:
        real: the trained parameters.
        leaves: what stands in place of each: a leaf with its memory, or with that of a copy.
        tensors: the id of a parameter or of a buffer -> what stands in its place.
        arguments: of the call, flat.
        given: parameters whose memory the leaves have.
    """

    real: Sequence[torch.Tensor]
    leaves: list[torch.Tensor]
    tensors: dict[int, torch.Tensor]
    arguments: list[Any]
    given: list[torch.Tensor]

    @staticmethod
    def of(forward: ModuleCall, arguments: list[Any], how: ReplayOptions) -> _Replacements:
        """Make them, from what was kept of the call where that was."""
        module = forward.module
        kept = {**forward.kept.parameters, **forward.kept.buffers}
        generator = None if how.seed is None else torch.Generator().manual_seed(how.seed)
        unit = forward.autocast[1] if forward.autocast[2] else None
        parameters = list(zip(module.parameters(), forward.trained, strict=True))
        real = [p for p, trained in parameters if trained]
        # what is written to copies of its own is put back with these
        may_share = how.seed is None and not how.as_it_was_at_backward
        leaves = list[torch.Tensor]()
        given = list[torch.Tensor]()
        for p in real:
            own = kept.get(id(p), p)
            if may_share and can_be_shared(own):
                given.append(own)
                leaves.append(shared(own))
            else:
                copy = _nudged(own.detach().clone(), generator, unit)
                leaves.append(_of_class(p, copy).requires_grad_())
        # what has been unfrozen since the call was a constant in it
        constants = [
            *module.buffers(),
            *(p for p, trained in parameters if not trained and (p.requires_grad or id(p) in kept)),
        ]
        tensors = {id(t): kept.get(id(t), t).detach().clone() for t in constants}
        if not how.own_parameters:
            tensors.update((id(p), leaf) for p, leaf in zip(real, leaves, strict=True))
        values = _values(arguments, forward.needs_gradient, generator, unit)
        return _Replacements(
            real,
            leaves,
            tensors,
            values,
            given,
        )

    def write(self, at_backward: Sequence[AtBackward]) -> None:
        """Write what the program had written between the call and its backward."""
        for then in at_backward[-1:]:
            of_parameters = zip(map(id, self.real), self.leaves, strict=True)
            for key, own in (*of_parameters, *self.tensors.items()):
                if key in then.tensors:
                    own.data.copy_(then.tensors[key])
            for value, other in zip(self.arguments, then.arguments, strict=False):
                if isinstance(value, torch.Tensor):
                    value.data.copy_(other)


class _Arrivals:
    """Hands gradients over as soon as they are known.

    Args:
        receive: called with the id of each parameter and its gradient.
        scale: by which what goes backward is multiplied.
    """

    def __init__(self, receive: ReceiveGradient, scale: float) -> None:
        self._receive = receive
        self._scale = scale
        self._tasks = set[int]()
        self._arrived = set[int]()

    def watch(
        self,
        outputs: Iterable[torch.Tensor],
        keys: Iterable[int],
        leaves: Iterable[torch.Tensor],
    ) -> None:
        """Watch a backward from outputs: what the forward has set on leaves comes before."""
        for output in outputs:
            output.register_hook(self._begin)
        for key, leaf in zip(keys, leaves, strict=True):
            leaf.register_hook(functools.partial(self._arrive, key))

    def _begin(self, _: torch.Tensor) -> None:
        self._tasks.add(torch._C._current_graph_task_id())

    def _arrive(self, key: int, arrived: torch.Tensor) -> torch.Tensor | None:
        # a backward inside of this one adds to `.grad`, which is no part of what is asked
        if torch._C._current_graph_task_id() not in self._tasks:
            return None
        if arrived.layout != torch.strided or type(arrived) not in OWN:
            return None
        # what compares it is of the suite, and nobody asks what that writes
        with torch._C._DisableTorchDispatch():
            self.take(key, arrived)
            # autograd would keep all gradients until the last one is there: this one has no memory
            return arrived.new_zeros(()).expand(arrived.shape)

    def take(self, key: int, arrived: torch.Tensor | None) -> None:
        """Hand over a gradient, once."""
        if arrived is not None and key not in self._arrived:
            self._arrived.add(key)
            # a product, since rows that are compressed cannot be divided; the scale is a power of
            # two. Of a scale of 1, too: a function may write to what it has returned
            self._receive(key, arrived * (1 / self._scale))


def _differentiate(
    result: ReplayResult,
    outputs: Sequence[torch.Tensor],
    cotangents: Mapping[int, torch.Tensor],
    made: _Replacements,
    how: ReplayOptions,
    receive: ReceiveGradient | None,
) -> None:
    """Compute the gradients of a call's parameters from those of its outputs."""

    def note_inside(index: int, given: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        result.inside[index] = arrived
        return given

    scaled = [g * how.scale for g in cotangents.values()]
    found = [outputs[index] for index in cotangents]
    if how.own:
        result.injected = list(_injected(outputs))
        scaled = [torch.zeros_like(given) for given in scaled]
    if how.received:
        for index, given in zip(cotangents, scaled, strict=True):
            outputs[index].register_hook(functools.partial(note_inside, index, given))
        scaled = [torch.zeros_like(given) for given in scaled]
    keys = [id(p) for p in made.real]
    arrivals = _Arrivals(receive or result.gradients.__setitem__, how.scale)
    if receive is not None:
        arrivals.watch(found, keys, made.leaves)
    gradients = torch.autograd.grad(
        found,
        made.leaves,
        scaled,
        allow_unused=True,
    )
    for key, gradient in zip(keys, gradients, strict=True):
        arrivals.take(key, gradient)
    # other than torch's own
    result.functions = frozenset(filter(is_of_program, kinds_of(outputs)))
