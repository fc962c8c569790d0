"""The dispatch modes of the suite."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A mode that `torch.compile` may look into: torch then does not import its compiler, which
    takes two seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
