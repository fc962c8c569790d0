"""The ledger: a dispatch mode that books every operation of a training loop under the phase it happens in.

What it sees: every operation that autograd or the loop asks torch for, on any device, and the life of every storage
that such an operation returns. What it does not see: buffers that a kernel allocates and frees inside one operation
(a workspace, the copy that a matrix product makes of an operand without the right strides), what an allocator rounds
up, and `UntypedStorage.resize_` until the next operation on that storage.

What it changes: under any dispatch mode autograd sums the gradients that reach a tensor used several times in one
forward out of place (`add`), where it otherwise sums them in place (`add_`). torch's own memory tracker is a dispatch
mode too and shares this. Adding a micro-batch's gradient to `.grad`, taking it and cloning it are not affected.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.errors import UsageError
from gradcheck_suite.measure.ledger.memory import (
    ACTIVATIONS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    Peak,
    Storages,
)
from gradcheck_suite.measure.ledger.traffic import Access, Traffic, access

PHASES = ("reset", "forward", "backward", "accumulate", "handling", "step", "other")
"""What a loop does, told apart without patching anything:

- reset: gradients are zeroed or released;
- forward: inside the loss;
- backward: autograd runs;
- accumulate: the part of the backward in which a gradient is added to `.grad`, or is taken or cloned as `.grad`, with
  the hooks that hang there;
- handling: the loop itself reads or changes gradients (clipping, scaling, copying);
- step: inside an optimizer's step;
- other: all else, the loader and the loop's own arithmetic among it.
"""
_ZEROING = frozenset({"zero_", "_foreach_zero_"})
_NOT_IN_BACKWARD = -1
_MARK, _UNMARK = "profiler._record_function_enter_new", "profiler._record_function_exit"
_CATEGORY = {"forward": ACTIVATIONS, "other": OTHER, "handling": OTHER}


@dataclass
class _Line:
    """One line of the book: a window, a phase, an operation."""

    operations: int = 0
    views: int = 0
    read: int = 0
    written: int = 0
    allocated: int = 0
    freed: int = 0


@dataclass(frozen=True)
class _Phase:
    """A phase that was entered: by name, in which autograd task (a later one is a backward in it), at which mark."""

    name: str
    task: int
    marks: int


@dataclass
class _Recording:
    """What a ledger holds only while it records, so that nothing is kept alive afterwards."""

    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    hooks: list[Any] = field(default_factory=list)
    phases: list[_Phase] = field(default_factory=list)
    in_forward: bool = False
    marks: int = 0
    """How many of the profiler's marks are open: torch wraps every step in one, which closes when the step raises."""


class Ledger(TorchDispatchMode):
    """Books what happens inside `with ledger:`, once.

    A window is what happens up to and including the end of an optimizer's step outside a backward; what follows the
    last step is a window of its own. So the reset after a step belongs to the window that it prepares.

    Attributes:
        window: the index of the window that is being booked.
        starts: for each window, the bytes alive by category when its first forward began.
        live: bytes alive by category, now or at the end. Parameters, buffers, gradients and optimizer state that were
            there at the start count from then on; other tensors from before do not.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Make a ledger.

        Args:
            model: whose parameters and buffers, and their gradients, are told from other tensors.
            optimizer: whose state is told from other tensors, and whose steps end a window. Without one, the steps of
                any optimizer do.
        """
        super().__init__()
        self.window = 0
        self.starts: list[dict[str, int]] = []
        self._book: defaultdict[tuple[int, str, str], _Line] = defaultdict(_Line)
        self._peaks: dict[tuple[int, str], Peak] = {}
        book = weakref.ref(self)
        self._storages = Storages(lambda category, size: _freed(book(), category, size))
        self._model, self._optimizer = model, optimizer
        self._recording: _Recording | None = None
        self._done = False

    # --- what was booked

    @property
    def live(self) -> dict[str, int]:
        """Bytes alive by category, now or, once the ledger is closed, at its end."""
        return dict(self._storages.live)

    def total(self, *phases: str, window: int | None = None, operation: str | None = None) -> Traffic:
        """Return the sum over some phases (all without any), over one window or all, of one operation or all."""
        _check_phases(phases)
        found = Traffic()
        for (w, phase, name), line in self._book.items():
            if (not phases or phase in phases) and window in (None, w) and operation in (None, name):
                found += Traffic(**vars(line))
        return found

    def operations(self, *phases: str, window: int | None = None) -> dict[str, int]:
        """Return how often each operation ran in some phases (all without any), views left out."""
        _check_phases(phases)
        found: Counter[str] = Counter()
        for (w, phase, name), line in self._book.items():
            if line.operations and (not phases or phase in phases) and window in (None, w):
                found[name] += line.operations
        return dict(found)

    def peak(self, *phases: str, window: int | None = None) -> Peak:
        """Return the peak over some phases (all without any), in one window or all.

        Raises:
            UsageError: nothing happened there.
        """
        _check_phases(phases)
        found = [p for (w, phase), p in self._peaks.items() if (not phases or phase in phases) and window in (None, w)]
        if not found:
            raise UsageError(f"ledger: no operation was booked in phases {phases or PHASES} of window {window}")
        return max(found, key=lambda peak: peak.bytes)

    # --- booking

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book what happens inside under a phase; a backward inside is still a backward."""
        _check_phases((name,))
        if (now := self._recording) is None:
            raise UsageError(f"ledger: phase({name!r}) outside `with ledger:`; enter the ledger first")
        if name == "forward":
            self._begin_forward()
        depth = len(now.phases)
        now.phases.append(_Phase(name, torch._C._current_graph_task_id(), now.marks))
        try:
            yield
        finally:
            del now.phases[depth:]

    def end_window(self) -> None:
        """Begin the next window, as the end of a step does: for loops that step without an optimizer."""
        self.window += 1
        if self._recording is not None:
            self._recording.in_forward = False

    def __enter__(self) -> Ledger:
        if self._done or self._recording is not None:
            raise UsageError("ledger: a ledger books one `with` block; make another Ledger")
        model, optimizer = self._model, self._optimizer
        parameters = [] if model is None else list(model.parameters())
        if model is not None:
            for tensor in (*parameters, *model.buffers()):
                self._storages.add(tensor.untyped_storage(), PARAMETERS)
        for tensor in _state(optimizer):
            self._storages.add(tensor.untyped_storage(), STATE)
        self._recording = _Recording(parameters, optimizer)
        # held while recording and no longer
        self._model = self._optimizer = None
        self._find_gradients(adopt=True)
        book = weakref.ref(self)
        self._recording.hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _stepping(book(), optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _stepped(book(), optimizer)),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        assert self._recording is not None
        for hook in self._recording.hooks:
            hook.remove()
        self._find_gradients()
        self._storages.close()
        self._recording, self._done = None, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and book it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = access(func, args, kwargs, out)
        if not (found.operands or found.made):
            self._note_mark(found.name)
            return out
        phase = self._phase_of(found)
        line = self._book[self.window, phase, found.name]
        if found.view:
            line.views += 1
        else:
            line.operations += 1
        line.read += found.read
        line.written += found.written
        for storage in found.made:
            line.allocated += self._storages.add(storage, _CATEGORY.get(phase, TEMPORARIES))
        for storage in found.operands:
            growth = self._storages.measure(storage)
            line.allocated += max(growth, 0)
            line.freed += max(-growth, 0)
        if phase == "accumulate":
            self._note_gradients(found, out)
        self._note_peak(phase)
        return out

    def _note_mark(self, name: str) -> None:
        assert self._recording is not None
        if name == _MARK:
            self._recording.marks += 1
        elif name == _UNMARK:
            self._recording.marks -= 1
            phases = self._recording.phases
            # a step that raised is over with its mark, though nobody said so
            while phases and phases[-1].marks > self._recording.marks:
                phases.pop()

    def _note_gradients(self, found: Access, out: Any) -> None:
        """What accumulation writes to, takes over or makes is a gradient from now on."""
        taken = [out.untyped_storage()] if isinstance(out, torch.Tensor) else []
        for storage in (*found.changed, *found.made, *taken):
            if self._storages.category(storage) not in (PARAMETERS, STATE):
                self._storages.move(storage, GRADIENTS)

    def _phase(self) -> str:
        """Return the phase as far as it does not depend on what an operation touches."""
        task = torch._C._current_graph_task_id()
        if self._recording is not None and self._recording.phases:
            entered = self._recording.phases[-1]
            if entered.task == task:
                return entered.name
        if task == _NOT_IN_BACKWARD:
            return "other"
        node = torch._C._current_autograd_node()
        return "accumulate" if node is not None and node.name() == "torch::autograd::AccumulateGrad" else "backward"

    def _phase_of(self, found: Access) -> str:
        phase = self._phase()
        if phase != "other":
            return phase
        if found.name in _ZEROING:
            # a gradient that the loop has only just assigned is not known as one yet
            self._find_gradients()
        if any(self._storages.category(storage) == GRADIENTS for storage in found.operands):
            return "reset" if found.name in _ZEROING else "handling"
        return phase

    def _find_gradients(self, *, adopt: bool = False) -> None:
        """Look which storages are gradients now; with `adopt`, count those that were there before."""
        assert self._recording is not None
        for p in self._recording.parameters:
            if p.grad is not None and p.grad.layout is torch.strided:
                storage = p.grad.untyped_storage()
                if adopt:
                    self._storages.add(storage, GRADIENTS)
                if self._storages.category(storage) not in (PARAMETERS, STATE):
                    self._storages.move(storage, GRADIENTS)

    def _begin_forward(self) -> None:
        assert self._recording is not None
        if not self._recording.in_forward:
            self._recording.in_forward = True
            self._find_gradients()
            self.starts.append(self.live)

    def _note_peak(self, phase: str) -> None:
        total, known = self._storages.total, self._peaks.get((self.window, phase))
        if known is None or total > known.bytes:
            self._peaks[self.window, phase] = Peak(total, self.live, phase, self.window)


def _check_phases(phases: tuple[str, ...]) -> None:
    for name in phases:
        if name not in PHASES:
            raise UsageError(f"ledger: phase must be one of {', '.join(PHASES)}; got {name!r}")


def _state(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for values in () if optimizer is None else optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _freed(ledger: Ledger | None, category: str, size: int) -> None:
    if ledger is None:
        return
    phase = ledger._phase()
    if phase == "other" and category == GRADIENTS:
        phase = "reset"
    ledger._book[ledger.window, phase, ""].freed += size


def _stepping(ledger: Ledger | None, optimizer: torch.optim.Optimizer) -> None:
    if ledger is None or (now := ledger._recording) is None:
        return
    ledger._find_gradients()
    now.phases.append(_Phase("step", torch._C._current_graph_task_id(), now.marks))


def _stepped(ledger: Ledger | None, optimizer: torch.optim.Optimizer) -> None:
    if ledger is None or (now := ledger._recording) is None:
        return
    now.phases.pop()
    for tensor in _state(optimizer):
        if ledger._storages.category(tensor.untyped_storage()) in (TEMPORARIES, OTHER):
            ledger._storages.move(tensor.untyped_storage(), STATE)
    if torch._C._current_graph_task_id() == _NOT_IN_BACKWARD and now.optimizer in (None, optimizer):
        ledger.end_window()
