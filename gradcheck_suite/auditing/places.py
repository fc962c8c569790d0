"""Places in the user's program, read off the stack: `train.py:12`."""

from __future__ import annotations

import ast
import dis
import gc
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from types import CodeType, FrameType
from typing import Any

from gradcheck_suite.core.frames import Owner, owner_of
from gradcheck_suite.core.text import file_text

_SKIPPED = {Owner.MACHINERY, Owner.SUITE, Owner.TORCH}
# code without a file may be the program of `python -c`
_USERS = {Owner.UNNAMED, Owner.USER}


@dataclass(frozen=True)
class Place:
    """A place in the program.

    Attributes:
        line: `file:line` of the innermost frame outside torch and the suite.
        path: `file:line` of the frames of the user's own files, innermost first.
    """

    line: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.path or self.path[0] == self.line:
            return self.line
        return f"{self.line} < {self.path[0]}"


NOWHERE = Place("?")


def is_users(filename: str | None) -> bool:
    """Return whether a source file is the user's own: neither of torch, nor of the suite, nor an
    installed package.
    """
    return filename is not None and owner_of(filename) in _USERS


def is_own(filename: str) -> bool:
    """Return whether a source file is the suite's."""
    return owner_of(filename) is Owner.SUITE


def shown(filename: str) -> str:
    """Return a file as a user would name it: relative to the folder that the program runs in, or a
    notebook's cell.
    """
    cell = file_text(filename)
    return _relative(filename) if cell == filename else cell


@lru_cache(maxsize=4096)
def _relative(filename: str) -> str:
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # another drive
        return filename
    return filename if relative.startswith("..") else relative


MOST_FRAMES = 6


def here() -> Place:
    """Return the place in the user's program that runs."""
    frame: FrameType | None = sys._getframe(1)
    line = ""
    path = list[str]()
    # several frames: two losses that go backward through one helper of a trainer are two places
    while frame is not None and len(path) < MOST_FRAMES:
        owner = owner_of(frame.f_code.co_filename)
        if owner not in _SKIPPED:
            place = f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"
            line = line or place
            if owner in _USERS:
                path.append(place)
        frame = frame.f_back
    return Place(line, tuple(path)) if line else NOWHERE


Loop = tuple[Any, ...]
"""Where a program is in the loops around the innermost one: equal as long as that one has not ended."""


@lru_cache(maxsize=1024)
def _for_loops(code: CodeType) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Return the `for` loops of a function, outer ones first: first and last instruction, and the
    names they bind.
    """
    loops = list[tuple[int, int, tuple[str, ...]]]()
    instructions = list(dis.get_instructions(code))
    for number, head in enumerate(instructions):
        if head.opname != "FOR_ITER":
            continue
        names = list[str]()
        for one in instructions[number + 1 :]:
            # since Python 3.13 a loop whose body stands on its line stores and loads in one
            # instruction: what it loads may belong to the body
            if one.opname == "STORE_FAST_LOAD_FAST":
                names.append(one.argval[0])
                break
            if one.opname.startswith("STORE_"):
                names += one.argval if isinstance(one.argval, tuple) else [one.argval]
            elif not one.opname.startswith("UNPACK_"):
                break
        loops.append((head.offset, head.argval, tuple(names)))
    return tuple(loops)


def _bound(frame: FrameType, names: Sequence[str]) -> list[Any]:
    """Return what loops have bound to some names: numbers and text, the identity of anything else."""
    values = [frame.f_locals.get(name) for name in names]
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # the copy that a frame keeps of its variables would let no tensor go before the function
        # returns
        frame.f_locals.clear()
    return [value if isinstance(value, int | float | str | None) else id(value) for value in values]


def loop_here() -> Loop | None:
    """Return where the user's program is in its loops, without the innermost `for` loop.

    None where there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    found: list[Any] | None = None
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            around = [
                names
                for first, last, names in _for_loops(frame.f_code)
                if first < frame.f_lasti < last
            ]
            if found is not None:
                found.append(frame.f_lasti)  # called once more, from another line
            elif around:
                *around, innermost = around
                if any(name in innermost for names in around for name in names):
                    return None  # as with `_`: what the outer loop has bound is overwritten
                found = []
            if found is not None:
                found += (
                    _bound(frame, [name for names in around for name in names]) if around else ()
                )
        frame = frame.f_back
    return None if found is None else tuple(found)


MOST_LINES = 4


@lru_cache(maxsize=1024)
def lines_with(call: str, place: Place) -> list[str]:
    """Return where the user's files of a place have a call, a few at most: torch has no hook for
    `zero_grad`.
    """
    files = dict.fromkeys(line.rpartition(":")[0] for line in place.path)
    lines = (
        (f"{file}:{n}", text)
        for file in files
        for n, text in enumerate(linecache.getlines(file), 1)
    )
    return [line for line, text in lines if call in text.partition("#")[0]][:MOST_LINES]


@lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    """Return a file's program.

    An empty one of a cell of a notebook that has a command of the shell.
    """
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse("")


def _tree(file: str) -> ast.Module:
    return _parsed("".join(linecache.getlines(file)))


def is_tried(place: Place) -> bool:
    """Return whether a place lies in a `try` inside a loop, which may begin it anew after an
    exception.
    """
    for file, _, number in (line.rpartition(":") for line in place.path):
        loops = (loop for loop in ast.walk(_tree(file)) if isinstance(loop, ast.For | ast.While))
        tried = (
            one
            for loop in loops
            for one in ast.walk(loop)
            if isinstance(one, ast.Try) and one.handlers
        )
        if any(one.lineno <= int(number) < one.handlers[0].lineno for one in tried):
            return True
    return False


_LEAVES = ast.Break | ast.Return | ast.Raise


def is_given_up(line: str) -> bool:
    """Return whether the statement at `file:line` is followed, under the same condition, by one
    that leaves the loop.
    """
    file, _, number = line.rpartition(":")
    suites = (suite for node in ast.walk(_tree(file)) for suite in _conditional(node))
    return any(_is_left_after(int(number), suite) for suite in suites)


def _is_left_after(number: int, suite: list[ast.stmt]) -> bool:
    """Return whether a line is one of some statements, and a later one of these leaves the loop."""
    is_here = any(one.lineno <= number <= (one.end_lineno or number) for one in suite)
    return is_here and any(one.lineno > number and isinstance(one, _LEAVES) for one in suite)


def _conditional(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the statements that run together under a condition."""
    if isinstance(node, ast.If):
        return [node.body, node.orelse]
    return [node.body] if isinstance(node, ast.ExceptHandler) else []


def is_reset(node: ast.AST) -> bool:
    """Return whether a node may reset a `.grad`: `zero_grad()`, `.grad.zero_()`, `.grad = None`, a
    product with 0.
    """
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        arguments = ast.unparse(ast.Tuple(node.args)).strip("(,)")
        of_zero = name.endswith((".mul_", ".fill_")) and arguments in ("0", "0.0")
        return name.endswith(("zero_grad", "_foreach_zero_")) or (
            "grad" in name and (name.endswith(".zero_") or of_zero)
        )
    if isinstance(node, ast.Assign | ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        value = ast.unparse(node.value)
        return ".grad" in ast.unparse(target) and (
            value in ("None", "0", "0.0") or "zeros" in value
        )
    return False


def is_clipping(node: ast.AST) -> bool:
    """Return whether a node clips gradients."""
    return isinstance(node, ast.Call) and "clip_grad" in ast.unparse(node.func)


def is_edit(node: ast.AST) -> bool:
    """Return whether a node may write something else than 0 to a `.grad`, as clipping does."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        edits = (
            "clip_grad" in name
            or name.endswith("unscale_")
            or (".grad." in name and name.endswith("_"))
        )
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        edits = any(
            isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets
        )
    return edits and not is_reset(node)


def lines_between(
    is_one: Callable[[ast.AST], bool], first: Place, last: Place, step: Place, *, same_loop: bool
) -> list[str]:
    """Return the lines that may have changed `.grad` between two passes: torch has no hook for a
    change in place.

    Args:
        is_one: tells whether a node of the program may be what has changed it.
        first: the pass before it.
        last: the pass after it; no step came between them.
        step: after them. What runs together with it, as the reset right after it, has not run
            between the passes.
        same_loop: whether the innermost `for` loop around the passes has not ended between them.
    """
    found: list[str] = []
    for file in dict.fromkeys(line.rpartition(":")[0] for line in (*first.path, *step.path)):
        numbers = [
            [int(n) for f, _, n in (x.rpartition(":") for x in p.path) if f == file]
            for p in (first, last, step)
        ]
        tree = _tree(file)
        nodes = [*ast.walk(tree)]
        does_it = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            and any(map(is_one, ast.walk(node)))
            and not any(node.lineno <= n <= (node.end_lineno or n) for of in numbers for n in of)
        }
        calls = (one for one in nodes if isinstance(one, ast.Call))
        lines = {
            one.lineno for one in nodes if isinstance(one, ast.stmt | ast.expr) and is_one(one)
        }
        lines |= {
            one.lineno for one in calls if ast.unparse(one.func).rpartition(".")[2] in does_it
        }
        suites = (
            getattr(node, name, None) for node in nodes for name in ("body", "orelse", "finalbody")
        )
        for suite in (each for each in suites if isinstance(each, list)):
            of = {
                n: i
                for i, one in enumerate(suite)
                for n in range(one.lineno, (one.end_lineno or one.lineno) + 1)
            }
            before, after, stepped = ([of[n] for n in each if n in of] for each in numbers)
            # the innermost statements around the step run together; a module runs once, and a loop
            # that goes on, too
            together = any(not hasattr(suite[i], "body") for i in stepped) or suite is tree.body
            inside = (
                same_loop and before == after and before and isinstance(suite[before[0]], ast.For)
            )
            if bool(before) != bool(after) or not (together or inside):
                continue
            a, b = (before[0], after[0]) if before else (0, -1)
            between = (
                range(a, b + 1) if a <= b or not before else (*range(a, len(suite)), *range(b + 1))
            )
            lines -= {n for n in lines & of.keys() if of[n] not in between}
        found += [f"{file}:{n}" for n in sorted(lines)]
    return found


_LINE = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')


def in_trace(entries: Iterable[str]) -> str | None:
    """Return the innermost place of the user's own files in a formatted stack, or None."""
    for entry in reversed(list(entries)):
        found = _LINE.search(entry)
        if found is not None and is_users(found["file"]):
            return f"{shown(found['file'])}:{found['line']}"
    return None


def _subclasses(kind: type) -> set[type]:
    children: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_subclasses, children))


def living(*kinds: type) -> list[Any]:
    """Return every object of some classes that the garbage collector knows.

    Lazy proxies are not touched.
    """
    # by `type`, not `isinstance`, which reads `__class__` and so would import what a lazy proxy
    # stands for
    wanted = set[type]().union(*map(_subclasses, kinds))
    objects = gc.get_objects()
    # there may be millions of objects, so no Python runs for each
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))
