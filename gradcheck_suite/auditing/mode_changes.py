"""Modules that trained and, after an evaluation, are left in eval mode.

Modes change between the windows here. Inside of a window `recomputation` judges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from gradcheck_suite.auditing.places import Place
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.text import counted


def depends_on_mode(module: torch.nn.Module) -> bool:
    """Return whether a module, or a part of it, computes something else in eval mode."""
    return any(map(_part_depends, module.modules()))


def _part_depends(part: torch.nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.p > 0
    if isinstance(part, _NormBase):
        return True
    if isinstance(part, torch.nn.MultiheadAttention | torch.nn.RNNBase):
        return part.dropout > 0
    if type(part).__module__.startswith("torch.nn."):
        return False
    # a module of the program's own may ask for its mode, as for `F.dropout`
    code = getattr(type(part).forward, "__code__", None)
    return code is None or "training" in code.co_names


@dataclass
class _Runs:
    """The passes of one line that went through one module.

    Attributes:
        trained: number of passes in train mode.
        since: number of passes in eval mode since the last one in train mode.
        step: index of the step of the first of these.
    """

    trained: int = 0
    since: int = 0
    step: int = 0


class ModeChanges:
    """Takes the calls of modules that a gradient came through."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Place, int], _Runs] = {}
        self._depends: dict[int, bool] = {}

    def kept(self, place: Place, module: torch.nn.Module, *, training: bool, step: int) -> None:
        """Note a call whose module is known; arguments as for `ran`."""
        if id(module) not in self._depends:
            self._depends[id(module)] = depends_on_mode(module)
        self.ran(
            place,
            id(module),
            training=training,
            step=step,
        )

    def ran(self, place: Place, module: int, *, training: bool, step: int) -> None:
        """Note a call.

        Args:
            place: of the backward pass.
            module: its id.
            training: its mode.
            step: index of the step that comes next.
        """
        if not self._depends.get(module, False):
            return
        runs = self._runs.setdefault((place, module), _Runs())
        if training:
            runs.trained += 1
            runs.since = 0
            return
        if not runs.since:
            runs.step = step
        runs.since += 1

    def findings(self) -> Iterator[Occurrence]:
        """Yield a finding for each line that trained in train mode first and in eval mode at last."""
        found: dict[Place, _Runs] = {}
        for (place, _), runs in self._runs.items():
            # what was in eval mode from the beginning is so on purpose, as a frozen backbone
            if runs.trained and runs.since:
                found.setdefault(place, runs)
        for place, runs in found.items():
            said = (
                f"the model ran in train mode here, and from step {runs.step} on in eval mode"
                f" ({counted(runs.since, 'backward pass')})"
            )
            yield finding("wrong-mode", said, place)
