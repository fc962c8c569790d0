"""Which elements of each `.grad` a program sets to 0 between the backward passes of a window, as the
rows of an embedding that are frozen.

The samples of replay are too few for it, and a projection onto random signs does not tell which
elements have changed. So some thousands of elements are kept from an arrival to the next look: in
the windows that are looked at in full, and of gradients that are sampled as a whole in any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradcheck_suite.auditing import samples
from gradcheck_suite.auditing.samples import Raw

MOST = 4096
"""Elements of a gradient that are kept."""


@dataclass
class _Kept:
    """What is kept of one `.grad` in a window: arrays, or tensors where it lies on a device.

    Attributes:
        then: its elements when it was last looked at.
        zeroed: which of them were set to 0 between passes, where others were not; False as long as
            nothing has changed them.
        stood: which of them stood there after a pass, and were left.
        has_other: whether an element was changed to something else.
    """

    then: Any
    zeroed: Any = False
    stood: Any = False
    has_other: Any = False


class MaskWatch:
    """Compares elements of gradients before and after what a program does between passes."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def arrived(
        self, gradients: Mapping[int, torch.Tensor], *, full: bool, sparse: Collection[int]
    ) -> None:
        """Keep elements of gradients after an arrival.

        Args:
            gradients: of parameters by their keys.
            full: whether elements of all are kept.
            sparse: the keys of parameters of which they are kept in any case.
        """
        for key, gradient in gradients.items():
            if not full and key not in sparse:
                self._kept.pop(key, None)
                continue
            then = _elements(gradient)
            known = self._kept.get(key)
            if then is None:
                self._kept.pop(key, None)
            elif known is not None and known.then.shape == then.shape:
                known.then = then
            else:
                self._kept[key] = _Kept(then)

    def begun(self, keys: Iterable[int]) -> None:
        """Forget what was kept of gradients that begin anew, or are no more."""
        for key in keys:
            self._kept.pop(key, None)

    def unchanged(self, keys: Iterable[int]) -> None:
        """Note that gradients stand as the last arrival left them."""
        for key in self._kept.keys() & keys:
            known = self._kept[key]
            known.stood = known.stood | (known.then != 0)

    def changed(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, Raw]:
        """Compare gradients that were changed since the last arrival, at the begin of a pass.

        Returns:
            as `_told`, of those of which elements were kept.
        """
        found = dict[int, Raw]()
        for key in self._kept.keys() & gradients.keys():
            known = self._kept[key]
            now = _elements(gradients[key])
            if now is None or now.shape != known.then.shape:
                del self._kept[key]
                continue
            is_other = now != known.then
            is_left = ~is_other & (now != 0)
            # nothing is left where all was reset: the next pass begins anew
            is_part = is_left.any()
            known.zeroed = (known.zeroed | (is_other & (now == 0))) & is_part
            known.stood = (known.stood | is_left) & is_part
            known.has_other = (known.has_other | (is_other & (now != 0)).any()) & is_part
            known.then = now
            found[key] = _told(known)
        return found

    def stepped(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, Raw]:
        """Compare gradients at a step, which ends their window.

        What is edited after the last pass is no part of what is done between passes: it is asked
        only what is left.

        Returns:
            as `_told`, of those of which elements were kept.
        """
        found = dict[int, Raw]()
        for key in self._kept.keys() & gradients.keys():
            known = self._kept.pop(key)
            # nothing was changed between its passes
            now = None if known.zeroed is False else _elements(gradients[key])
            if now is not None and now.shape == known.then.shape:
                known.stood = known.stood | (now != 0)
                found[key] = _told(known)
        return found


def _elements(gradient: torch.Tensor) -> Any | None:
    """Return a copy of some elements of a gradient, None where they have no fixed places."""
    if gradient.layout != torch.strided or gradient.is_nested or gradient.is_complex():
        return None
    return samples.some_of(samples.local(gradient.detach()), MOST)


def _told(known: _Kept) -> Raw:
    """Return three numbers, 1 or 0: whether elements of a `.grad`, and not all that stood there, were
    set to 0 between passes; whether some of these stand in it after another pass of the window;
    whether an element was changed to something else.
    """
    found = [known.zeroed.any(), (known.zeroed & known.stood).any(), known.has_other]
    if isinstance(known.then, torch.Tensor):
        return torch.stack(found).double()
    return np.array(found, np.float64)
