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
from gradcheck_suite.auditing.vectors import MaskedElements

MOST = 4096
MOST_OF_ALL = 1 << 21
"""Elements of a gradient that are kept, and those of all gradients together: thousands of layers would else take the
memory of a copy of them."""


@dataclass
class _Kept:
    """What is kept of one `.grad` in a window: arrays, or tensors where it lies on a device.

    Attributes:
        then: its elements when it was last looked at.
        brought: which of them the last arrival has changed.
        zeroed: which of them were set to 0 between passes, where others were not; False as long as
            nothing has changed them.
        stood: which of them stood there after a pass, and were left.
        has_other: whether an element was changed to something else.
        is_written: whether the program has written to the gradient between passes, also what stood
            there already.
    """

    then: Any
    brought: Any
    zeroed: Any = False
    stood: Any = False
    has_other: Any = False
    is_written: bool = False


@dataclass
class _Ended:
    """What edits after the last pass have set to 0 in the windows so far.

    Attributes:
        gone: the elements that were set to 0 in some window, those alone that its last pass had not
            reached, and all of these.
        left: those that stood there at a step, in some of these windows.
    """

    gone: Any
    left: Any


class MaskWatch:
    """Compares elements of gradients before and after what a program does between passes."""

    def __init__(self) -> None:
        self._most = MOST
        self._kept: dict[int, _Kept] = {}
        self._ended: dict[int, _Ended] = {}

    def arrived(
        self, gradients: Mapping[int, torch.Tensor], *, full: bool, sparse: Collection[int]
    ) -> None:
        """Keep elements of gradients after an arrival.

        Args:
            gradients: of parameters by their keys.
            full: whether elements of all are kept.
            sparse: the keys of parameters of which they are kept in any case.
        """
        self._most = min(self._most, max(MOST_OF_ALL // max(len(gradients), 1), 1))
        for key, gradient in gradients.items():
            if not full and key not in sparse:
                self._kept.pop(key, None)
                continue
            then = _elements(gradient, self._most)
            known = self._kept.get(key)
            if then is None:
                self._kept.pop(key, None)
            elif known is not None and known.then.shape == then.shape:
                known.brought = then != known.then
                known.then = then
            else:
                self._kept[key] = _Kept(then, brought=then != 0)

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
            now = _elements(gradients[key], self._most)
            if now is None or now.shape != known.then.shape:
                del self._kept[key]
                continue
            elements = MaskedElements.of(known.then, now)
            # nothing is left where all was reset: the next pass begins anew
            is_part = elements.left.any()
            known.zeroed = (known.zeroed | elements.zeroed) & is_part
            known.stood = (known.stood | elements.left) & is_part
            known.has_other = (known.has_other | elements.other.any()) & is_part
            known.is_written = True
            known.then = now
            found[key] = _told(known)
        return found

    def stepped(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, Raw]:
        """Compare gradients at a step, which ends their window.

        What is edited after the last pass is no part of what is done between passes: of that it is
        asked what is left, and whether it has left what the last pass has brought alone.

        Returns:
            as `_told`, of those of which elements were kept.
        """
        found = dict[int, Raw]()
        for key in self._kept.keys() & gradients.keys():
            known = self._kept.pop(key)
            now = _elements(gradients[key], self._most)
            if now is not None and now.shape == known.then.shape:
                is_of_last = self._ends(key, known, now)
                known.stood = known.stood | (now != 0)
                found[key] = _told(known, *is_of_last)
        return found

    def _ends(self, key: int, known: _Kept, now: Any) -> tuple[Any, Any]:
        """Note what an edit after the last pass has left of a `.grad`.

        Returns:
            whether it is what the last pass has reached, and other elements were set to 0; whether
            these are others than in earlier windows.
        """
        is_gone = (known.then != 0) & (now == 0)
        is_left = now != 0
        is_of_last = ~(is_gone & known.brought).any() & ~(is_left & ~known.brought).any()
        is_of_last = is_of_last & is_left.any() & is_gone.any()
        ended = self._ended.get(key)
        if ended is None or ended.gone.shape != now.shape:
            ended = _Ended(gone=is_gone & False, left=is_left & False)
        ended.gone = ended.gone | (is_gone & is_of_last)
        ended.left = ended.left | (is_left & is_of_last)
        if isinstance(now, torch.Tensor) or is_of_last:
            self._ended[key] = ended
        return is_of_last, (ended.gone & ended.left).any()


def _elements(gradient: torch.Tensor, most: int) -> Any | None:
    """Return a copy of at most so many elements of a gradient, None where they have no fixed places."""
    if gradient.layout != torch.strided or gradient.is_nested or gradient.is_complex():
        return None
    return samples.some_of(samples.local(gradient.detach()), most)


def _told(known: _Kept, is_of_last: Any = False, varies: Any = False) -> Raw:
    """Return six numbers, 1 or 0, of elements of a `.grad`.

    Whether some, and not all that stood there, were set to 0 between passes; whether some of these
    stand in it after another pass of the window; whether one was changed to something else; at a
    step, whether those that the last pass has not reached were set to 0 after it, and whether these
    are others than in earlier windows; whether the program has written to it between passes.
    """
    is_changed = known.zeroed is not False
    between = (
        [known.zeroed.any(), (known.zeroed & known.stood).any()] if is_changed else [False] * 2
    )
    told = [*between, known.has_other, is_of_last, varies, known.is_written]
    if not isinstance(known.then, torch.Tensor):
        return np.array(told, np.float64)
    device = known.then.device
    return torch.stack(
        [torch.full((), one, device=device) if isinstance(one, bool) else one for one in told]
    ).double()
