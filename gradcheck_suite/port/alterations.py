"""What people write in place of torch's, in one format.

A table has rows, each of which makes an alteration of every value that it has for its parameter: of
an operation, a tensor, an optimizer's settings, running statistics.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gradcheck_suite.port.changes import RAISED

LONGEST = 160
"""Characters of the words of an alteration: a tensor in words is of many lines."""


@dataclass(frozen=True)
class Alteration:
    """One thing that may be otherwise.

    Attributes:
        cause: a name of `core.causes.CAUSES`.
        words: what the port does.
        make: torch's value -> what is made of it.
    """

    cause: str
    words: str
    make: Callable[[Any], Any]


Options = Callable[..., Iterable[Any]] | Iterable[Any]
"""Values of a parameter, or a function of what a row is asked about that returns them."""


@dataclass(frozen=True)
class AlterationFamily:
    """Alterations that differ in the value of one parameter.

    Attributes:
        cause: a name of `core.causes.CAUSES`.
        where: pattern of the names of operations, optimizers or buffers that it is of.
        words: what the port does, with `{}` for the value and `{given}` for what it is asked about.
        make: (torch's value, value of the parameter) -> what is made of it.
        options: values of the parameter.
    """

    cause: str
    where: str
    words: str
    make: Callable[[Any, Any], Any]
    options: Options = (None,)

    def is_of(self, name: str) -> bool:
        """Return whether it is of an operation, an optimizer or a buffer."""
        return re.fullmatch(self.where, name) is not None

    def alterations(self, given: Any, *more: Any) -> Iterator[Alteration]:
        """Yield an alteration for each value of the parameter.

        Args:
            given: what the row is asked about.
            more: what the options are read off besides.
        """
        for value in self.values(given, *more):
            words = self.words.format(value, given=given)
            words = textwrap.shorten(words, LONGEST, placeholder=" ...")
            yield Alteration(self.cause, words, lambda x, v=value: self.make(x, v))

    def values(self, given: Any, *more: Any) -> list[Any]:
        """Return the values of the parameter, none where the row does not fit what it is asked
        about.
        """
        try:
            return list(self.options(given, *more) if callable(self.options) else self.options)
        except RAISED:
            return []
