"""The ledger: what a training step allocates, reads and writes, by operation and phase."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.errors import UsageError
from studies.reset_laws import MemoryTraffic

PHASES = ("reset", "forward", "backward", "accumulate", "handling", "step", "other")
"""The phases of a loop, distinguished without patching anything:

- reset: gradients are zeroed or released;
- forward: inside the loss;
- backward: autograd runs;
- accumulate: the part of the backward in which a gradient is added to `.grad`, or is taken or cloned as `.grad`,
  including the hooks that run there;
- handling: the loop itself reads or changes gradients (clipping, scaling, copying);
- step: inside an optimizer's step;
- other: everything else, such as the loader and the loop's own arithmetic.
"""


@dataclass(frozen=True)
class Phase:
    """A phase that was entered.

    Attributes:
        name: the phase's name.
        task: the autograd task in which it was entered; a later task is a backward inside the
            phase.
        marks: the number of profiler marks that were open.
    """

    name: str
    task: int
    marks: int


def check_phases(phases: tuple[str, ...]) -> None:
    """Raise `UsageError` unless every name is that of a phase."""
    for name in phases:
        if name not in PHASES:
            raise UsageError(f"ledger: phase must be one of {', '.join(PHASES)}; got {name!r}")


PARAMETERS = "parameters"
GRADIENTS = "gradients"
STATE = "optimizer state"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
OTHER = "other"
CATEGORIES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES, OTHER)
"""The categories of storages: parameters and buffers; gradients and accumulators; optimizer state; storages that a
forward allocates; storages that a backward, a reset or a step allocates; storages that the loop itself allocates, such
as batches, counts and weighted losses."""


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once.

    Attributes:
        bytes: bytes alive in all categories together.
        by_category: bytes alive by category at that moment.
        phase: the phase of that moment.
        window: the index of the window of that moment.
    """

    bytes: int
    by_category: dict[str, int]
    phase: str
    window: int


@dataclass
class _Entry:
    reference: weakref.ref[torch.UntypedStorage]
    bytes: int
    category: str


class Storages:
    """The storages that are alive, and their bytes by category.

    A storage counts once, however many views it has, from the moment that an operation returns it
    until torch frees it, when the callback of a weak reference runs. Nothing here keeps a storage
    alive.
    """

    def __init__(self, on_free: Callable[[str, int], None]) -> None:
        """Start with no storage.

        Args:
            on_free: called with the category and the bytes of every storage that torch frees, after
                it was removed.
        """
        self.live = dict.fromkeys(CATEGORIES, 0)
        self._entries: dict[int, _Entry] = {}
        self._on_free = on_free

    @property
    def total(self) -> int:
        """Bytes alive."""
        return sum(self.live.values())

    def category(self, storage: torch.UntypedStorage) -> str | None:
        """Return the category of a storage, or None for a storage that was not added."""
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry.category

    def add(self, storage: torch.UntypedStorage, category: str) -> int:
        """Add a storage unless it was added before; return the bytes added."""
        if storage._cdata in self._entries:
            return 0
        key, size = storage._cdata, storage.nbytes()
        # a weak reference, since a storage that outlives this object must not keep it alive
        owner = weakref.ref(self)

        def gone(_: object) -> None:
            if (alive := owner()) is not None:
                alive._remove(key)

        self._entries[key] = _Entry(weakref.ref(storage, gone), size, category)
        self.live[category] += size
        return size

    def move(self, storage: torch.UntypedStorage, category: str) -> None:
        """Change the category of a storage that was added."""
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self.live[entry.category] -= entry.bytes
            self.live[category] += entry.bytes
            entry.category = category

    def measure(self, storage: torch.UntypedStorage) -> int:
        """Return by how many bytes a storage has grown since it was added or last measured."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            return 0
        growth = storage.nbytes() - entry.bytes
        entry.bytes += growth
        self.live[entry.category] += growth
        return growth

    def close(self) -> None:
        """Stop watching storages; the figures stay as they are."""
        self._entries.clear()

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.live[entry.category] -= entry.bytes
            self._on_free(entry.category, entry.bytes)


OVERWRITES = frozenset(
    {
        *("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"),
        *(
            "bernoulli_",
            "cauchy_",
            "exponential_",
            "geometric_",
            "log_normal_",
            "normal_",
            "random_",
            "uniform_",
        ),
    }
)
"""In-place operations that do not read the tensor that they change."""
METADATA = frozenset(
    {
        *(
            "as_strided_",
            "resize_",
            "resize_as_",
            "set_",
            "squeeze_",
            "swapaxes_",
            "swapdims_",
            "t_",
        ),
        *("transpose_", "unsqueeze_"),
    }
)
"""In-place operations that change a tensor's metadata, not its elements."""
UNFILLED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operations that allocate and write nothing."""
FRESH = frozenset({"lift_fresh"})
"""Operations whose operand was allocated just before, invisible to dispatch modes (`torch.tensor(...)`)."""


@dataclass(frozen=True)
class Access:
    """What one operation did to memory.

    Attributes:
        name: the operation's name without `aten.` and overload, such as `"add_"` and
            `"_foreach_zero_"`.
        view: whether it only made a view or changed metadata.
        read: bytes read.
        written: bytes written.
        operands: storages of its tensor arguments.
        changed: storages that it wrote to in place.
        made: storages of its results that no argument has; no storage twice.
    """

    name: str
    view: bool
    read: int
    written: int
    operands: tuple[torch.UntypedStorage, ...]
    changed: tuple[torch.UntypedStorage, ...]
    made: tuple[torch.UntypedStorage, ...]


def access(func: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> Access:
    """Return what an operation that has just run did to memory, from its schema and its tensors
    alone.

    An operation reads every tensor argument once, at elements x itemsize, and writes every tensor
    that it makes or changes once. No cache is modelled, and a broadcast (expanded) operand counts
    at its expanded size. Operations that only make a view or change metadata move nothing.

    Raises:
        UsageError: one of its tensors is not dense (sparse, nested), and so has no storage to
            count.
    """
    name = _name(func)
    handed, changed = _operands(func, args, kwargs)
    results = list(_tensors(out))
    _check(name, (*handed, *changed, *results))
    operands = _storages((*handed, *changed))
    known = {} if name in FRESH else operands
    made = {key: storage for key, storage in _storages(results).items() if key not in known}
    view = name in METADATA or name in FRESH or (bool(results) and not changed and not made)
    read = 0 if view or _reads_nothing(name) else _bytes(handed)
    fresh = [] if name in UNFILLED else [t for t in results if t.untyped_storage()._cdata in made]
    return Access(
        name=name,
        view=view,
        read=read,
        written=0 if view else _bytes((*changed, *fresh)),
        operands=tuple(operands.values()),
        changed=() if view else tuple(_storages(changed).values()),
        made=tuple(made.values()),
    )


@cache
def _name(func: torch._ops.OpOverload) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _reads_nothing(name: str) -> bool:
    """Return whether an operation uses only shape, dtype and device of its operand."""
    return name.startswith("new_") or name.endswith("_like") or name in UNFILLED


def _operands(
    func: torch._ops.OpOverload, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads and the tensors that it changes.

    The two overlap.
    """
    overwrites = _name(func) in OVERWRITES
    read: list[torch.Tensor] = []
    changed: list[torch.Tensor] = []
    for i, (name, writes, is_out) in enumerate(_parameters(func)):
        value = args[i] if i < len(args) else kwargs.get(name)
        if value is None:
            continue
        tensors = list(_tensors(value))
        if writes:
            changed += tensors
        if not (writes and (overwrites or is_out)):
            read += tensors
    return read, changed


@cache
def _parameters(func: torch._ops.OpOverload) -> tuple[tuple[str, bool, bool], ...]:
    """Return each argument's name, whether it is written to, and whether it is an `out`."""
    return tuple(
        (a.name, a.alias_info is not None and a.alias_info.is_write, a.is_out)
        for a in func._schema.arguments
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _check(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"ledger: {name} has a tensor of layout {tensor.layout} and shape"
                f" {tuple(tensor.shape)}, and only dense (torch.strided) tensors can be counted:"
                " use dense gradients (sparse=False) in what is recorded"
            )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the tensors' storages by address, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return elements x itemsize.

    Tensors with the same storage, offset, shape and strides count once.
    """
    places = {
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in tensors
    }
    return sum(t.numel() * t.itemsize for t in places.values())


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

    A window ends with an optimizer's step outside a backward; what follows the last step is a
    window of its own. The reset after a step therefore belongs to the next window.

    Sizes are the same on every device. A dispatch mode sees every operation that autograd or the
    loop calls, and the lifetime of every storage that such an operation returns. It does not see
    buffers that a kernel allocates and frees inside one operation (a workspace, the copy that a
    matrix product makes of an operand with unsuitable strides), the allocator's rounding, and
    `UntypedStorage.resize_` until the next operation on that storage.

    It changes one thing: under any dispatch mode, torch's own memory tracker included, autograd
    sums the gradients of a tensor used several times in one forward out of place (`add`), where it
    otherwise sums them in place (`add_`). Adding a micro-batch's gradient to `.grad`, taking it and
    cloning it are not affected.

    Attributes:
        window: index of the window that is being recorded.
        starts: for each window, the bytes alive by category when its first forward began.
        moments: bytes alive by category after each operation and at each end of a window; empty
            unless asked for.
        live: bytes alive by category, now or at the end. Parameters, buffers, gradients and
            optimizer state that existed at the start count from then on; other tensors that existed
            at the start do not.
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
            optimizer: the optimizer whose state has a category of its own, and whose steps end a
                window. Without one, the steps of any optimizer end a window.
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

    def total(self, *phases: str, window: int | None = None) -> MemoryTraffic:
        """Return the sum over the named phases (default all), in one window or all."""
        check_phases(phases)
        found = MemoryTraffic()
        for (w, phase, _), line in self._lines.items():
            if (not phases or phase in phases) and window in (None, w):
                found += MemoryTraffic(**line)
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
        found = [
            p
            for (w, phase), p in self._peaks.items()
            if (not phases or phase in phases) and window in (None, w)
        ]
        if not found:
            raise UsageError(
                f"ledger: no operation was recorded in phases {phases or PHASES} of window {window}"
            )
        return max(found, key=lambda peak: peak.bytes)

    # --- recording

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what happens inside under a phase.

        A backward inside is still recorded as a backward.
        """
        check_phases((name,))
        if (now := self._recording) is None:
            raise UsageError(
                f"ledger: phase({name!r}) outside `with ledger:`; enter the ledger first"
            )
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
            register_optimizer_step_pre_hook(lambda *_: _before_step(ledger())),
            register_optimizer_step_post_hook(
                lambda optimizer, *_: _after_step(ledger(), optimizer)
            ),
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
        return (
            "accumulate"
            if node is not None and node.name() == "torch::autograd::AccumulateGrad"
            else "backward"
        )

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
        """Find the storages that are gradients now.

        With `adopt`, add those that existed before the recording.
        """
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


def _before_step(ledger: Ledger | None) -> None:
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
