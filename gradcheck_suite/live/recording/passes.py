"""Backward passes, the gradients that arrive at parameters in them, and the optimizers that wait for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from gradcheck_suite.live.recording.calls import Received
from gradcheck_suite.live.recording.forwards import Forward
from gradcheck_suite.live.recording.places import NOWHERE, Place
from gradcheck_suite.live.recording.sketches import Sketch, as_array, sketch

MAX_PENDING = 1024
"""Backward passes without a step that are remembered for one optimizer."""


@dataclass(eq=False)
class Pass:
    """One backward pass, from the outermost call of backward to its return.

    Attributes:
        number: counts passes of the whole run, from 0.
        place: of the call of backward.
        accumulates: False for `torch.autograd.grad`, which leaves `.grad` alone.
        received: the cotangents that calls of losses received.
        arrivals: id of each parameter -> sketch of what arrived, after the user's hooks.
        after: id of each parameter -> sketch of its `.grad` when the pass had ended; kept for few windows.
        held: id of each parameter -> its `.grad` when the pass had ended, weakly; kept where `after` is.
        edited: names of edits of user hooks: id of a parameter -> whether its elements got fixed factors.
        consumers: ids of the optimizers that have stepped on the pass.
        clips: factors of gradient clipping since the pass, as (parameter ids, total norm, largest norm).
        versions: id of an optimizer -> fingerprint of its parameters when the pass began.
        forwards: recorded calls of modules -> index of an output -> the gradient that it received.
        trained: id of an optimizer -> number of its step that had the pass in its gradient.
        steps: number of steps of all optimizers before the pass.
        unknown: the name of the autograd node of a loss that no recognised call is part of, or None.
    """

    number: int
    place: Place = NOWHERE
    accumulates: bool = True
    received: list[Received] = field(default_factory=list)
    arrivals: dict[int, Sketch | torch.Tensor] = field(default_factory=dict)
    after: dict[int, Sketch | torch.Tensor] = field(default_factory=dict)
    held: dict[int, TensorWeakRef] = field(default_factory=dict)
    edited: dict[int, bool] = field(default_factory=dict)
    consumers: set[int] = field(default_factory=set)
    clips: list[tuple[frozenset[int], Any, float]] = field(default_factory=list)
    versions: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    unknown: str | None = None
    forwards: dict[Forward, dict[int, torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class Watched:
    """One optimizer and the backward passes since its last step.

    Attributes:
        optimizer: a weak reference to it.
        parameters: id -> the parameter, weakly.
        pending: passes in which something arrived at one of its parameters.
        previous: id of each parameter -> sketch of `.grad` at the last step, or when the watch began.
        steps: number of its steps.
        names: id of each parameter -> its name; empty until one is asked for.
        detail: whether `.grad` is sketched at the end of each backward pass.
        overflown: whether passes were forgotten, so that the window cannot be judged.
        late: whether the optimizer was found at its first step.
        measure: whether the next window is computed again, since the size of a violation is not known.
        stepping: whether its `step()` runs.
        in_closure: whether the closure of its `step()` runs.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    pending: list[Pass] = field(default_factory=list)
    previous: dict[int, Sketch | torch.Tensor] = field(default_factory=dict)
    steps: int = 0
    names: dict[int, str] = field(default_factory=dict)
    detail: bool = True
    overflown: bool = False
    late: bool = False
    measure: bool = False
    stepping: bool = False
    in_closure: bool = False

    def add(self, backward: Pass) -> None:
        """Note a pass in which something arrived at one of the parameters."""
        if self.pending and self.pending[-1] is backward:
            return
        self.pending.append(backward)
        backward.versions[id(self)] = self.fingerprint()
        if len(self.pending) > MAX_PENDING:
            del self.pending[0]
            self.overflown = True

    def missing(self) -> str | None:
        """Return why not all passes since the last step are recorded; None where they are."""
        if self.overflown:
            return f"more than {MAX_PENDING} backward passes came before it, and the first of them were not kept"
        if self.late:
            return "the audit found its optimizer only at that step, and had recorded no backward pass for it"
        return None

    def live(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield the id and the parameter, for those that still exist."""
        for key, reference in self.parameters.items():
            parameter = reference()
            if parameter is not None:
                yield key, parameter

    def fingerprint(self) -> tuple[Any, ...]:
        """Return what changes when something writes to the parameters."""
        parameters = [p for _, p in self.live()]
        sample = [p.detach() for p in parameters[:8] if p.device.type == "cpu" and p.numel()]
        values = tuple(float(p.as_strided((), ())) for p in sample if p.layout == torch.strided)
        return sum(p._version for p in parameters), sum(p.data_ptr() for p in parameters), values

    def replaced(self) -> bool:
        """Whether each `.grad` is another tensor than the last backward pass left; False where that was not noted."""
        held = self.pending[-1].held if self.pending else {}
        both = [(held[key](), p.grad) for key, p in self.live() if key in held and p.grad is not None]
        return bool(both) and all(then is not now for then, now in both)

    def gradients(self) -> dict[int, Sketch]:
        """Return the sketch of each parameter's `.grad`, zeros for None."""
        found = {key: sketch(p.grad) for key, p in self.live() if p.grad is not None and supported(p.grad)}
        return {key: as_array(value) for key, value in found.items()}


def supported(gradient: torch.Tensor) -> bool:
    """Whether a gradient can be sketched: a plain real tensor, dense or COO, on a device with float64."""
    return (
        type(gradient) in (torch.Tensor, torch.nn.Parameter)
        and gradient.is_floating_point()
        and gradient.layout in (torch.strided, torch.sparse_coo)
        and gradient.device.type in ("cpu", "cuda")
    )


class Gate:
    """The hooks on one parameter: the first sees what arrives, the last what the user's hooks made of it.

    Hooks run in the order of the dictionary that holds them. Where the user has hooks on the parameter, ours are moved
    to both ends of it before a backward pass.
    """

    def __init__(self, parameter: torch.Tensor, run: Any) -> None:
        self.parameter = weakref.ref(parameter)
        self.owners: list[Watched] = []
        self._run, self._key = run, id(parameter)
        self._ratio: torch.Tensor | None = None
        self._raw: torch.Tensor | None = None
        self._last: torch.utils.hooks.RemovableHandle | None = None
        self._first = parameter.register_hook(self._arrive)

    def arrange(self) -> None:
        """Put the hooks at both ends where the user has hooks of his own."""
        parameter = self.parameter()
        if parameter is None or not (hooks := parameter._backward_hooks) or len(hooks) == 1:
            return
        if self._last is None:
            self._last = parameter.register_hook(self._settle)
        order = [key for key in hooks if key not in (self._first.id, self._last.id)]
        order = [self._first.id, *order, self._last.id]
        if list(hooks) != order:
            items = [(key, hooks[key]) for key in order if key in hooks]
            hooks.clear()
            for key, value in items:
                hooks[key] = value

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _arrive(self, gradient: torch.Tensor) -> None:
        backward = self._run.current_pass()
        if backward is None:
            return
        for owner in self.owners:
            owner.add(backward)
        if not supported(gradient):
            self._run.note_unsupported(gradient)
            return
        if self._last is not None:
            self._raw = gradient.detach().clone()
        else:
            self._add(backward, gradient)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _settle(self, gradient: torch.Tensor) -> None:
        backward, raw, self._raw = self._run.current_pass(), self._raw, None
        if backward is None or raw is None or not supported(gradient):
            return
        self._add(backward, gradient)
        final = gradient.detach()
        if raw.layout == torch.strided and final.shape == raw.shape and not torch.equal(final, raw):
            ratio = torch.where(raw != 0, final / raw, torch.nan)
            fixed = True
            if self._ratio is not None:
                both = ~(ratio.isnan() | self._ratio.isnan())
                fixed = torch.allclose(ratio[both], self._ratio[both], rtol=1e-3 if ratio.element_size() > 2 else 2e-2)
            self._ratio = ratio
            backward.edited[self._key] = fixed

    def _add(self, backward: Pass, gradient: torch.Tensor) -> None:
        found = sketch(gradient)
        before = backward.arrivals.get(self._key)
        # several arrivals in one pass come from nested passes; the norms of parts bound the norm of the sum
        backward.arrivals[self._key] = found if before is None else before + found

    def close(self) -> None:
        """Remove the hooks."""
        self._first.remove()
        if self._last is not None:
            self._last.remove()


def is_finite(value: Sketch) -> bool:
    """Whether what was sketched is finite."""
    return bool(np.isfinite(value).all())
