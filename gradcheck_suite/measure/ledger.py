"""The ledger: a dispatch mode that records every operation of a training loop under the phase in which it runs.

It uses no clock and needs no GPU: sizes are the same on every device.

The ledger sees every operation that autograd or the loop calls, on any device, and the lifetime of every storage that
such an operation returns. It does not see buffers that a kernel allocates and frees inside one operation (a workspace,
the copy that a matrix product makes of an operand with unsuitable strides), the allocator's rounding, and
`UntypedStorage.resize_` until the next operation on that storage.

The ledger changes one thing: under any dispatch mode, autograd sums the gradients of a tensor used several times in one
forward out of place (`add`), where it otherwise sums them in place (`add_`). torch's own memory tracker is a dispatch
mode too and has the same effect. Adding a micro-batch's gradient to `.grad`, taking it and cloning it are not affected.
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
from gradcheck_suite.measure.operation import Access, access
from gradcheck_suite.measure.phases import PHASES, Phase, check_phases
from gradcheck_suite.measure.storages import (
    ACTIVATIONS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    Peak,
    Storages,
)
from gradcheck_suite.schema.costs import Traffic

_ZEROING = frozenset({"zero_", "_foreach_zero_"})
_NOT_IN_BACKWARD = -1
_MARK, _UNMARK = "profiler._record_function_enter_new", "profiler._record_function_exit"
_CATEGORY = {"forward": ACTIVATIONS, "other": OTHER, "handling": OTHER}


@dataclass
class _Recording:
    """What a ledger refers to only while it records, so that it keeps nothing alive afterwards."""

    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    hooks: list[Any] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    in_forward: bool = False
    marks: int = 0
    """Number of open profiler marks: torch wraps every step in a mark, which closes even when the step raises."""


class Ledger(TorchDispatchMode):
    """Records what happens inside `with ledger:`; a ledger records one such block.

    A window ends with an optimizer's step outside a backward; what follows the last step is a window of its own. The
    reset after a step therefore belongs to the next window.

    Attributes:
        window: index of the window that is being recorded.
        starts: for each window, the bytes alive by category when its first forward began.
        moments: bytes alive by category after each operation and at each end of a window; empty unless asked for.
        live: bytes alive by category, now or at the end. Parameters, buffers, gradients and optimizer state that
            existed at the start count from then on; other tensors that existed at the start do not.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        moments: bool = False,
    ) -> None:
        """Make a ledger.

        Args:
            model: the model whose parameters, buffers and gradients have categories of their own.
            optimizer: the optimizer whose state has a category of its own, and whose steps end a window. Without one,
                the steps of any optimizer end a window.
            moments: whether to keep `moments`, which grows with the number of operations.
        """
        super().__init__()
        self.window = 0
        self.starts: list[dict[str, int]] = []
        self.moments: list[dict[str, int]] = []
        self._keeps_moments = moments
        self._lines: defaultdict[tuple[int, str, str], Counter[str]] = defaultdict(Counter)
        self._peaks: dict[tuple[int, str], Peak] = {}
        ledger = weakref.ref(self)
        self._storages = Storages(lambda category, size: _freed(ledger(), category, size))
        self._model, self._optimizer = model, optimizer
        self._recording: _Recording | None = None
        self._done = False

    # --- figures

    @property
    def live(self) -> dict[str, int]:
        """Bytes alive by category, now or, once the ledger is closed, at its end."""
        return dict(self._storages.live)

    def total(self, *phases: str, window: int | None = None) -> Traffic:
        """Return the sum over the named phases (default all), in one window or all."""
        check_phases(phases)
        found = Traffic()
        for (w, phase, _), line in self._lines.items():
            if (not phases or phase in phases) and window in (None, w):
                found += Traffic(**line)
        return found

    def operations(self, *phases: str, window: int | None = None) -> dict[str, int]:
        """Return how often each operation ran in the named phases (default all), views left out."""
        check_phases(phases)
        found: Counter[str] = Counter()
        for (w, phase, name), line in self._lines.items():
            if line["operations"] and (not phases or phase in phases) and window in (None, w):
                found[name] += line["operations"]
        return dict(found)

    def peak(self, *phases: str, window: int | None = None) -> Peak:
        """Return the peak over the named phases (default all), in one window or all.

        Raises:
            UsageError: no operation ran there.
        """
        check_phases(phases)
        found = [p for (w, phase), p in self._peaks.items() if (not phases or phase in phases) and window in (None, w)]
        if not found:
            raise UsageError(f"ledger: no operation was recorded in phases {phases or PHASES} of window {window}")
        return max(found, key=lambda peak: peak.bytes)

    # --- recording

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what happens inside under a phase; a backward inside is still recorded as a backward."""
        check_phases((name,))
        if (now := self._recording) is None:
            raise UsageError(f"ledger: phase({name!r}) outside `with ledger:`; enter the ledger first")
        if name == "forward":
            self._begin_forward()
        depth = len(now.phases)
        now.phases.append(Phase(name, torch._C._current_graph_task_id(), now.marks))
        try:
            yield
        finally:
            del now.phases[depth:]

    def end_window(self) -> None:
        """Begin the next window, as the end of a step does; for loops without an optimizer."""
        self.window += 1
        self._note_moment()
        if self._recording is not None:
            self._recording.in_forward = False

    def __enter__(self) -> Ledger:
        if self._done or self._recording is not None:
            raise UsageError("ledger: a ledger records one `with` block; make another Ledger")
        model, optimizer = self._model, self._optimizer
        parameters = [] if model is None else list(model.parameters())
        if model is not None:
            for tensor in (*parameters, *model.buffers()):
                self._storages.add(tensor.untyped_storage(), PARAMETERS)
        for tensor in _state(optimizer):
            self._storages.add(tensor.untyped_storage(), STATE)
        self._recording = _Recording(parameters, optimizer)
        # a closed ledger must not keep model and optimizer alive
        self._model = self._optimizer = None
        self._find_gradients(adopt=True)
        ledger = weakref.ref(self)
        self._recording.hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _before_step(ledger(), optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _after_step(ledger(), optimizer)),
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
        """Run an operation and record it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = access(func, args, kwargs, out)
        if not (found.operands or found.made):
            self._note_mark(found.name)
            return out
        phase = self._phase_of(found)
        line = self._lines[self.window, phase, found.name]
        line["views" if found.view else "operations"] += 1
        line["read"] += found.read
        line["written"] += found.written
        for storage in found.made:
            line["allocated"] += self._storages.add(storage, _CATEGORY.get(phase, TEMPORARIES))
        for storage in found.operands:
            growth = self._storages.measure(storage)
            line["allocated"] += max(growth, 0)
            line["freed"] += max(-growth, 0)
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
            # torch calls no post hook after a step that raised, but it closes the step's mark
            while phases and phases[-1].marks > self._recording.marks:
                phases.pop()

    def _note_gradients(self, found: Access, out: Any) -> None:
        """Give the category of gradients to what accumulation writes to, takes over or makes."""
        taken = [out.untyped_storage()] if isinstance(out, torch.Tensor) else []
        for storage in (*found.changed, *found.made, *taken):
            if self._storages.category(storage) not in (PARAMETERS, STATE):
                self._storages.move(storage, GRADIENTS)

    def _phase(self) -> str:
        """Return the phase as far as it is known without the operation's tensors."""
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
            # the loop may have assigned a gradient since the last look
            self._find_gradients()
        if any(self._storages.category(storage) == GRADIENTS for storage in found.operands):
            return "reset" if found.name in _ZEROING else "handling"
        return phase

    def _find_gradients(self, *, adopt: bool = False) -> None:
        """Find the storages that are gradients now; with `adopt`, add those that existed before the recording."""
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

    def _note_moment(self) -> None:
        if self._keeps_moments:
            self.moments.append(self.live)

    def _note_peak(self, phase: str) -> None:
        self._note_moment()
        total, known = self._storages.total, self._peaks.get((self.window, phase))
        if known is None or total > known.bytes:
            self._peaks[self.window, phase] = Peak(total, self.live, phase, self.window)


def _state(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for values in () if optimizer is None else optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _freed(ledger: Ledger | None, category: str, size: int) -> None:
    if ledger is None:
        return
    phase = ledger._phase()
    if phase == "other" and category == GRADIENTS:
        phase = "reset"
    ledger._lines[ledger.window, phase, ""]["freed"] += size


def _before_step(ledger: Ledger | None, optimizer: torch.optim.Optimizer) -> None:
    if ledger is None or (now := ledger._recording) is None:
        return
    ledger._find_gradients()
    now.phases.append(Phase("step", torch._C._current_graph_task_id(), now.marks))


def _after_step(ledger: Ledger | None, optimizer: torch.optim.Optimizer) -> None:
    if ledger is None or (now := ledger._recording) is None:
        return
    now.phases.pop()
    for tensor in _state(optimizer):
        if ledger._storages.category(tensor.untyped_storage()) in (TEMPORARIES, OTHER):
            ledger._storages.move(tensor.untyped_storage(), STATE)
    if torch._C._current_graph_task_id() == _NOT_IN_BACKWARD and now.optimizer in (None, optimizer):
        ledger.end_window()
