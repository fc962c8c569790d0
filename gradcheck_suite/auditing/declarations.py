"""What the user declares of losses on the command line: by what the mean of one divides that goes
backward at a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from gradcheck_suite.auditing.places import shown_path
from gradcheck_suite.auditing.terms import declare_terms
from gradcheck_suite.core.findings import Occurrence, finding


class Declarations:
    """Declares the counts of losses.

    Args:
        objectives: `file:line` of a call of backward -> an expression of the names there.
    """

    def __init__(self, objectives: Mapping[str, str]) -> None:
        self._objectives = objectives
        self._declared: set[str] = set()
        self._undeclared: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._objectives)

    def declare(self, roots: Sequence[Any]) -> None:
        """Declare the count of a loss that goes backward at a line for which the user has given an
        expression.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            place = (  # given with or without its folder
                f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"
            )
            expression = next(
                (e for at, e in self._objectives.items() if (os.sep + place).endswith(os.sep + at)),
                None,
            )
            if expression is not None:
                self._declare_at(place, expression, frame, roots)
                return
            frame = frame.f_back

    def _declare_at(
        self, place: str, expression: str, frame: FrameType, roots: Sequence[Any]
    ) -> None:
        """Declare what an expression of the user's says at a line; what it raises is said at the end."""
        at = next(at for at in self._objectives if (os.sep + place).endswith(os.sep + at))
        try:
            with torch.no_grad():
                count = eval(expression, frame.f_globals, frame.f_locals)
            for root in roots:
                declare_terms(root, count, "mean")
        except Exception as error:
            self._undeclared.setdefault(at, f"{type(error).__name__}: {error}")
        else:
            self._declared.add(at)

    @property
    def unused(self) -> list[Occurrence]:
        """The declarations of the user's that said nothing of any loss, and why."""
        return [
            finding(
                "unused-declaration",
                f"--objective {at}={expression} declares nothing:"
                f" {self._undeclared.get(at, 'nothing went backward at this line')}",
            )
            for at, expression in self._objectives.items()
            if at not in self._declared
        ]
