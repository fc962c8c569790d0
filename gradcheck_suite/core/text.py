"""Words, and how they are printed: counts with nouns, columns, shares and errors, lines in colour
on a terminal.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from gradcheck_suite.core.faults import FAULTS

if TYPE_CHECKING:
    from gradcheck_suite.core.case import Plan

# Counts with their nouns, names and texts in two columns, names that were meant. Imports neither
# framework.


def aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each pair of a name and a text, with the texts in one column."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in pairs]


def summary_of(described: object) -> str:
    """Return what the first paragraph of a docstring says, on one line; empty without one."""
    return " ".join(inspect.cleandoc(described.__doc__ or "").partition("\n\n")[0].split())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 window` or `2 micro-batches`."""
    return (
        f"{number} {noun}"
        if number == 1
        else f"{number} {noun}{'es' if noun.endswith(('batch', 'pass')) else 's'}"
    )


MOST_NAMES = 3
"""Names that a sentence lists."""


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


MOST_SHOWN = 24
"""Micro-batches of an epoch that are shown one by one."""


def split_text(plan: Plan) -> str:
    """Return an epoch's item counts by window, such as `[1 3 | 2* 2 | 4]`.

    `*` marks one without valid targets. `[1 3 / 2 | 1 / -]` is that of two ranks, of which the
    second has fewer micro-batches and at last none. In a plan of many micro-batches equal
    neighbours are counted: `[85 x (1 1 1) | 1 1]`, `[33 x 1]`.
    """
    shown = [f"{n}*" if j in plan.masked else str(n) for j, n in enumerate(plan.micro_batches)]
    windows = [[shown[j] for j in window] for window in plan.windows]
    if plan.ranks:
        members = [plan.of_rank(rank) for rank in range(plan.world_size)]
        windows = [_dealt(window, members, shown) for window in plan.windows]
    if len(shown) <= MOST_SHOWN:
        return f"[{' | '.join(map(' '.join, windows))}]"
    texts = [" ".join(_runs(window, 6)) for window in windows]
    return f"[{' | '.join(_runs(texts, 3))}]"


def _dealt(
    window: Iterable[int], members: Iterable[Sequence[int]], shown: Sequence[str]
) -> list[str]:
    """Return the words of a window that is dealt to ranks; "-" for a rank that has none of it."""
    parts = [" ".join(shown[j] for j in window if j in own) for own in members]
    return " / ".join(part or "-" for part in parts).split(" ")


def _runs(texts: Iterable[str], least: int) -> list[str]:
    """Return texts with equal neighbours, if there are at least so many, written once with their
    number.
    """
    parts: list[str] = []
    for text, run in groupby(texts):
        times = len(list(run))
        if times < least:
            parts += [text] * times
        else:
            parts.append(f"{times} x ({text})" if " " in text else f"{times} x {text}")
    return parts


def cut_text(plan: Plan) -> str:
    """Return a plan in a few characters, such as `[1 2 | 1] K=2, 2 epochs`."""
    epochs = f", {plan.epochs} epochs" if plan.epochs > 1 else ""
    return f"{split_text(plan)} K={plan.accumulation_steps}{epochs}"


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean 'verify'?)` where a name is close to one that exists, else nothing."""
    # names of a module include Python's own, which nobody means
    close = get_close_matches(name, [n for n in names if not n.startswith("__")], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def file_text(filename: str) -> str:
    """Return a source file as its user names it: a cell of a notebook as IPython does, `Cell
    In[3]`.
    """
    # asked of a module that is loaded already: outside of a notebook IPython is not imported for it
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell and shell.compile.format_code_name(filename)
    return " ".join(cell) if cell else filename


def cell_lines(name: str) -> list[str]:
    """Return the lines of a notebook's cell that `file_text` has named; none where it is not known."""
    cells = (filename for filename in [*linecache.cache] if file_text(filename) == name)
    return [line.rstrip("\n") for line in linecache.getlines(next(cells, ""))]


def percent(share: float) -> str:
    """Return a share as a percentage of three digits."""
    return "less than 0.1%" if share < 1e-3 else f"{100 * share:.3g}%"


def of_bound(ratio: float) -> str:
    """Return an error over its bound in words: `91% of the rounding bound`.

    Two digits where they do not say 100.
    """
    # an error just above its bound must not be printed as 100%
    return f"{100 * ratio:.{2 if ratio < 0.995 else 4}g}% of the rounding bound"


SURE_VIOLATION = 100
"""Error over bound from which on the digits of the bound decide nothing: one of them is printed."""


def error_text(error: float, allowed: float) -> str:
    """Return an error beside its bound, such as `0.205, where rounding allows 7e-15`.

    The bound has three digits where the error is close to it. Far below the error it has one: its
    further digits are rounding error themselves and differ between processors.

    Args:
        error: |observed - expected|, in the units of the gradient.
        allowed: the largest error that rounding explains, in the same units.
    """
    digits = 1 if error > SURE_VIOLATION * allowed else 3
    return f"{error:.3g}, where rounding allows {allowed:.{digits}g}"


def violation_title(kind: str, diagnosis: str) -> str:
    """Return `kind: diagnosis`, or the kind alone where the diagnosis says no more."""
    return kind if kind == diagnosis else f"{kind}: {diagnosis}"


# Print lines: in colour on a terminal, where long ones are wrapped at words.


STYLES = {"good": "bold green", "bad": "bold red", "warn": "bold yellow", "label": "cyan"}
_COLOURED = (
    (
        r"^\S.*?  (?:(?P<good>holds|no violation so far \(interrupted\))|(?P<bad>VIOLATED)|(?P<warn>unjudged))(?=  |$)"
    ),
    r"^(?P<good>(?:the loop|all \d+ loops) holds?)|^(?P<bad>\d+ of \d+ loops? violated)",
    r"^ *(?P<bad>(?:gradient|step-count|none-pattern|non-finite|parameters|not-accumulable|raised)(?::"
    r" [\w-]+)?)"
    r"(?= at step \d|$)",
    rf"^ *(?:(?P<label>\S[^|]*:\d+): )?(?P<bad>{'|'.join(FAULTS)})(?= or |: )",
    r"^ *(?P<good>fix):",
    r"^ *(?P<label>(?:\S*:)?\d+ \|)",
    r"^ *(?P<warn>finding\b[^:]*|reason|accepted|unjudged):",
    r"^ *(?P<label>window|rank|parameter|error|stored|script|replay|page) {2,}",
    r"  (?P<label>[#-]* *\|[#-]*)$",
)
_COPIED = re.compile(r" *(@example\(|(stored|script|replay|page) {2,})")
"""Lines that a reader copies; a break within would break them."""
_HANGING = re.compile(r" *(?:[\w-]+ {2,})?")


def say(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines: on a terminal coloured, and wrapped at words under the text that they continue;
    else as they are.

    `NO_COLOR` and `FORCE_COLOR` overrule, as rich reads them.
    """
    # imported where something is printed: most of what imports this module prints nothing
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Words(RegexHighlighter):
        highlights = [*_COLOURED]  # noqa: RUF012 - as rich declares it

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the program with status 1, as if the code under test had

    file = sys.stdout if file is None else file
    # in a kernel rich would display HTML in place of writing to the file
    console = Terminal(
        file=file,
        force_jupyter=False,
        highlighter=Words(),
        theme=Theme(STYLES),
        markup=False,
        emoji=False,
        soft_wrap=True,
    )
    # what a program puts in place of its standard error often has no `isatty`
    width = console.width if getattr(file, "isatty", bool)() else None
    for line in lines:
        if width is None or _COPIED.match(line):
            console.print(line)
        else:
            console.print(_wrapped(_fitted(line, width), width))
    file.flush()


_BAR = re.compile(r"(?P<head>(?: +[\w.,+-]*\w){4,}  )(?P<before>[#-]* *)\|(?P<after>[#-]*)$")
_BAR_TITLE = re.compile(r"  weight \(bar\), expected \(\|\)$")
_SOURCE = re.compile(r"(?P<head> *(?:\S+:)?\d+ \| )(?P<text>.*?)(?P<note>   \S(?: ?\S)*)$")
_LONGEST_BAR = 25
_SHORTEST_BAR = 8
_SHORTEST_TEXT = 12


def _fitted(line: str, width: int) -> str:
    """Return a line that must stay one: a bar is drawn shorter, and a source line is cut before its
    note.

    Bars of one table begin in one column, so that they shrink by one factor.
    """
    if len(line) <= width and not _BAR.match(line):
        return line
    if bar := _BAR.match(line):
        room = max(width - len(bar["head"]) - 1, _SHORTEST_BAR)
        scale = min(1.0, room / _LONGEST_BAR)
        return f"{bar['head']}{_shrunk(bar['before'], scale)}|{_shrunk(bar['after'], scale)}"
    if _BAR_TITLE.search(line):
        return _BAR_TITLE.sub("  bar, |", line)
    if source := _SOURCE.match(line):
        room = max(width - len(source["head"]) - len(source["note"]), _SHORTEST_TEXT)
        text = source["text"].rstrip()
        text = text if len(text) <= room else f"{text[: room - 3]}..."
        return f"{source['head']}{text:<{room}}{source['note']}"
    return line


def _shrunk(part: str, scale: float) -> str:
    """Return a part of a bar, drawn and blank columns alike, in so much of its length."""
    drawn = len(part.rstrip())
    whole = round(len(part) * scale)
    return f"{part[:1] * min(whole, round(drawn * scale)):<{whole}}"


def _wrapped(line: str, width: int) -> str:
    hanging = _HANGING.match(line)
    indent = " " * min(hanging.end() if hanging else 0, width // 3)
    wrap = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    wrap.drop_whitespace = len(line) > width
    return wrap.fill(line) if len(line) > width else line
