"""Parameters that get gradients and that nothing updates: they are in no optimizer.

A parameter whose values change all the same is updated by the program itself, and is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch

from gradcheck_suite.auditing.events import PassRecord, StepRecord
from gradcheck_suite.auditing.places import Place, live_instances
from gradcheck_suite.auditing.recorder import TrackedParameter
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.text import counted, listed


class Strays:
    """Takes the passes and steps of one process.

    Args:
        parameters: key -> what is known of a parameter; the recorder adds to it.

    Attributes:
        found: key of a parameter that is in no optimizer -> where a gradient first arrived at it.
    """

    def __init__(self, parameters: Mapping[int, TrackedParameter]) -> None:
        self.found: dict[int, Place] = {}
        self._parameters = parameters
        self._reached: dict[int, Place] = {}
        self._owned: set[int] = set()
        self._points: dict[int, int] = {}
        self._is_sharded = False

    def on_pass(self, record: PassRecord) -> None:
        """Note at which parameters a gradient has arrived, and which have been written to."""
        self._is_sharded = self._is_sharded or bool(record.shards)
        if record.accumulates:
            for key in record.arrivals.keys() - self._reached.keys():
                self._reached[key] = record.place
        moved = [
            key
            for key in self.found
            if record.points.get(key) != self._points.setdefault(key, record.points.get(key, 0))
        ]
        for key in moved:
            self._owned.add(key)
            del self.found[key]

    def on_step(self, record: StepRecord) -> None:
        """Note whose parameters these are, and look whose the others are that were reached."""
        self._owned |= record.gradients.keys()
        for key in self.found.keys() & record.gradients.keys():
            del self.found[key]
        new = self._reached.keys() - self._owned - self.found.keys()
        # what FSDP computes with is no parameter of an optimizer, which has shards of it
        if not new or self._is_sharded:
            return
        # a search through all objects, once for each parameter that no step has shown
        of_optimizers = set[int]()
        for optimizer in live_instances(torch.optim.Optimizer):
            for group in optimizer.param_groups:
                of_optimizers.update(map(id, group["params"]))
        for key in new:
            parameter = self._parameters[key].reference() if key in self._parameters else None
            if not isinstance(parameter, torch.nn.Parameter) or id(parameter) in of_optimizers:
                self._owned.add(key)
                continue
            self.found[key] = self._reached[key]

    def findings(self, name_of: Callable[[int], str | None]) -> Iterator[Occurrence]:
        """Yield a finding for each line that sends gradients to such parameters."""
        by_place: defaultdict[str, list[int]] = defaultdict(list)
        for key, place in self.found.items():
            by_place[str(place)].append(key)
        for line, keys in by_place.items():
            names = listed([str(name_of(key)) for key in keys])
            number = counted(len(keys), "parameter")
            them = "it" if len(keys) == 1 else "them"
            said = f"{number} got a gradient here, and no optimizer has {them} ({names})"
            yield finding("parameter-without-optimizer", said, line)
