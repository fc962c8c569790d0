"""Anomaly mode, in which nodes keep the stacks that made them, switched on without the program seeing
it: its own use of the mode finds what it would find without an audit.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

_is_enabled = torch.is_anomaly_enabled
_checks_nan = torch.is_anomaly_check_nan_enabled


class NodeStacks:
    """Lets nodes keep their stacks for a while."""

    def __init__(self) -> None:
        self._checked: bool | None = None
        self._undo = contextlib.ExitStack()

    def open(self) -> None:
        """Tell the program of its own mode alone, which `detect_anomaly` puts back when it ends."""
        told = mock.patch.multiple(
            torch,
            is_anomaly_enabled=self._is_enabled_by_program,
            is_anomaly_check_nan_enabled=self._is_checked_by_program,
        )
        self._undo.enter_context(told)

    def close(self) -> None:
        """Leave the mode as the program has it."""
        self.end()
        self._checked = None
        self._undo.close()

    def keep(self) -> None:
        """Let nodes keep their stacks from now on."""
        if not _is_enabled():
            self._checked = _checks_nan()
            torch.set_anomaly_enabled(True, False)

    def end(self) -> None:
        """Let nodes keep no stacks any more."""
        if self._is_own:
            torch.set_anomaly_enabled(False, bool(self._checked))

    @property
    def _is_own(self) -> bool:
        """Whether the mode is on for an audit alone: a program that switches it on has NaNs checked."""
        return self._checked is not None and _is_enabled() and not _checks_nan()

    def _is_enabled_by_program(self) -> bool:
        return _is_enabled() and not self._is_own

    def _is_checked_by_program(self) -> bool:
        return bool(self._checked) if self._is_own else _checks_nan()
