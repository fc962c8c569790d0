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
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, compress
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

    def apart_from(self, others: Iterable[Place]) -> str:
        """Return the innermost line that tells it from other places: what one function sends
        backward may be called from several lines.
        """
        alike = [one.path for one in others if one != self and str(one) == str(self)]
        if not alike:
            return str(self)
        for depth, line in enumerate(self.path, 1):
            if all(path[:depth] != self.path[:depth] for path in alike):
                return line
        return str(self)


NOWHERE = Place("?")


def is_users(filename: str | None) -> bool:
    """Return whether a source file is the user's own: neither of torch, nor of the suite, nor an
    installed package.
    """
    return filename is not None and owner_of(filename) in _USERS


def is_suites(filename: str) -> bool:
    """Return whether a source file is the suite's."""
    return owner_of(filename) is Owner.SUITE


def shown_path(filename: str) -> str:
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


def current_place() -> Place:
    """Return the place in the user's program that runs."""
    frame: FrameType | None = sys._getframe(1)
    line = ""
    path = list[str]()
    # several frames: two losses that go backward through one helper of a trainer are two places
    while frame is not None and len(path) < MOST_FRAMES:
        owner = owner_of(frame.f_code.co_filename)
        if owner not in _SKIPPED:
            place = f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"
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
                if any(name in innermost for name in chain.from_iterable(around)):
                    return None  # as with `_`: what the outer loop has bound is overwritten
                found = []
            if found is not None:
                found += _bound(frame, list(chain.from_iterable(around))) if around else ()
        frame = frame.f_back
    return None if found is None else tuple(found)


MOST_LINES = 4


@lru_cache(maxsize=1024)
def lines_with(call: str, place: Place) -> list[str]:
    """Return where the user's files of a place have a call, a few at most: torch has no hook for
    `zero_grad`.
    """
    files = dict.fromkeys(line.rpartition(":")[0] for line in place.path)
    found = list[str]()
    for file in files:
        lines = enumerate(linecache.getlines(file), 1)
        found += [f"{file}:{n}" for n, text in lines if call in text.partition("#")[0]]
    return found[:MOST_LINES]


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


def variables_of(values: Iterable[Any]) -> dict[int, str]:
    """Return the id of each value that a variable of the user's functions that run holds, or an
    attribute of their `self`, with the name.
    """
    wanted = {id(value) for value in values}
    found = dict[int, str]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            own = frame.f_locals
            inside = getattr(own.get("self"), "__dict__", None)
            pairs = [*own.items(), *(inside.items() if type(inside) is dict else ())]
            for name, value in pairs:
                if id(value) in wanted:
                    found.setdefault(id(value), name)
        frame = frame.f_back
    return found


def lines_that_write(file: str, names: Collection[str]) -> list[str]:
    """Return the lines of a file that write to attributes or variables of some names.

    Those are left out that may be the first ones: in an `__init__`, and in no loop or function.
    """
    later = ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
    around = [node for node in ast.walk(_tree(file)) if isinstance(node, later)]
    first = [one for one in around if getattr(one, "name", "") == "__init__"]
    initial = set(chain.from_iterable(map(ast.walk, first)))
    nodes = set(chain.from_iterable(map(ast.walk, around))) - initial
    written = {getattr(node, "lineno", 0) for node in nodes if _written_names(node) & {*names}}
    return [f"{file}:{number}" for number in sorted(written)]


def _written_names(node: ast.AST) -> set[str]:
    """Return the names of what a statement writes to."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return set()
    parts = chain.from_iterable(ast.walk(target) for target in targets if target is not None)
    names = (getattr(part, "attr", getattr(part, "id", "")) for part in parts)
    return {name for name in names if name}


def is_tried(place: Place) -> bool:
    """Return whether a place lies in a `try` inside a loop, which may begin it anew after an
    exception.
    """
    for file, _, number in (line.rpartition(":") for line in place.path):
        loops = (loop for loop in ast.walk(_tree(file)) if isinstance(loop, ast.For | ast.While))
        tried = (
            one
            for one in chain.from_iterable(ast.walk(loop) for loop in loops)
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
    return _is_followed_by(line, _LEAVES)


def is_conditional(line: str) -> bool:
    """Return whether the statement at `file:line` stands in a condition itself: not in a loop in one,
    as all of a program under `if __name__ == "__main__":` does.
    """
    at = _under_condition(line)
    return any(not hasattr(one, "body") for one in chain.from_iterable(at.suites) if at.is_in(one))


def is_skipped(line: str) -> bool:
    """Return whether the statement at `file:line` is followed, under the same condition, by one that
    goes on with the next round of the loop.
    """
    return _is_followed_by(line, ast.Continue)


def _is_followed_by(line: str, wanted: type[ast.stmt] | types.UnionType) -> bool:
    at = _under_condition(line)
    return any(
        one.lineno > at.number and isinstance(one, wanted) for one in chain.from_iterable(at.suites)
    )


@dataclass(frozen=True)
class _UnderCondition:
    """A line of a program, and the conditions around it.

    Attributes:
        number: of the line.
        suites: the statements that run together under a condition, of each that has the line.
    """

    number: int
    suites: Sequence[Sequence[ast.stmt]]

    def is_in(self, statement: ast.stmt) -> bool:
        """Return whether the line is one of a statement's."""
        return statement.lineno <= self.number <= (statement.end_lineno or self.number)


def _under_condition(line: str) -> _UnderCondition:
    """Return the conditions around a line, `file:line`."""
    file, _, number = line.rpartition(":")
    at = _UnderCondition(int(number), [])
    suites = chain.from_iterable(map(_conditional, ast.walk(_tree(file))))
    return replace(at, suites=[suite for suite in suites if any(map(at.is_in, suite))])


def _conditional(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the statements that run together under a condition."""
    if isinstance(node, ast.If):
        return [node.body, node.orelse]
    return [node.body] if isinstance(node, ast.ExceptHandler) else []


def is_written_loss(line: str) -> bool:
    """Return whether the program writes a value, by `.data`, into what the statement at `file:line`
    sends backward: as a reduction over ranks for a log does.
    """
    file, _, number = line.rpartition(":")
    tree = _tree(file)
    at = _UnderCondition(int(number), ())
    sent = set[str]()
    for node in ast.walk(tree):
        is_one = isinstance(node, ast.Expr | ast.Assign) and at.is_in(node)
        if is_one and "backward" in ast.unparse(node):
            sent |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    data = {f"{name}.data" for name in sent}
    return any(data & set(_written_by(node)) for node in ast.walk(tree))


def _written_by(node: ast.AST) -> Iterator[str]:
    """Yield what a node may write to, as it stands in the program."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield ast.unparse(target).partition("[")[0]
    elif isinstance(node, ast.Call):
        what, _, name = ast.unparse(node.func).rpartition(".")
        if name.endswith("_"):
            yield what.partition("[")[0]
        elif "reduce" in name:
            yield from map(ast.unparse, node.args)


def is_reset(node: ast.AST) -> bool:
    """Return whether a node may reset a `.grad`: `zero_grad()`, `.grad.zero_()`, `.grad = None`, a
    product with 0.
    """
    return _sets_zero(node) and not _is_of_part(node)


def _sets_zero(node: ast.AST) -> bool:
    """Return whether a node may set a `.grad`, or elements of one, to 0 or None."""
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
        edits = any(_is_gradient(target) for target in targets)
    return edits and not _sets_zero(node)


def is_mask(node: ast.AST) -> bool:
    """Return whether a node may set elements of a `.grad` to 0, and leave the others."""
    return is_edit(node) or (_sets_zero(node) and _is_of_part(node))


_IN_PLACE = (
    "add_",
    "addcdiv_",
    "addcmul_",
    "clamp_",
    "copy_",
    "div_",
    "fill_",
    "lerp_",
    "load_state_dict",
    "mul_",
    "normal_",
    "set_",
    "sub_",
    "uniform_",
    "zero_",
)
"""Last parts of the names by which a program writes to a tensor, or to all of a module."""


def is_write(node: ast.AST) -> bool:
    """Return whether a node may write to parameters: in place, or by their `.data`."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return "grad" not in name and name.endswith(_IN_PLACE)
    return any(".data" in target and "grad" not in target for target in _targets(node))


def _is_gradient(target: ast.AST | None) -> bool:
    """Return whether what is assigned to is a `.grad`, or elements of one."""
    while isinstance(target, ast.Subscript) or (
        isinstance(target, ast.Attribute) and target.attr == "data"
    ):
        target = target.value
    return isinstance(target, ast.Attribute) and target.attr == "grad"


_PART = re.compile(r"\.grad(\.data)?\[(?!:\]|\.\.\.\])")
"""Elements of a `.grad` by their index, which is neither `[:]` nor `[...]`."""


def _is_of_part(node: ast.AST) -> bool:
    """Return whether a node writes to elements of a `.grad` by their index."""
    if isinstance(node, ast.Call):
        return _PART.search(ast.unparse(node.func)) is not None
    return any(_PART.search(target) for target in _targets(node))


def _targets(node: ast.AST) -> list[str]:
    """Return what an assignment assigns to."""
    if isinstance(node, ast.Assign):
        return list(map(ast.unparse, node.targets))
    return [ast.unparse(node.target)] if isinstance(node, ast.AugAssign) else []


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
        around = _Around(
            _lines_in(file, first), _lines_in(file, last), _lines_in(file, step), same_loop
        )
        tree = _tree(file)
        lines = _lines_of(is_one, tree, around)
        for suite in _suites(tree):
            lines -= around.not_between(suite, is_module=suite is tree.body)
        found += [f"{file}:{n}" for n in sorted(lines)]
    return found


def _lines_in(file: str, place: Place) -> list[int]:
    """Return the numbers of the lines of a place that are in a file, innermost first."""
    parts = (line.rpartition(":") for line in place.path)
    return [int(number) for name, _, number in parts if name == file]


def _suites(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the statements that stand below each other."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            suite = getattr(node, name, None)
            if isinstance(suite, list):
                yield suite


def _lines_of(is_one: Callable[[ast.AST], bool], tree: ast.Module, around: _Around) -> set[int]:
    """Return the lines that may change `.grad`, and those that call a function which may."""
    nodes = [*ast.walk(tree)]
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    does_it = {
        one.name
        for one in functions
        if any(map(is_one, ast.walk(one))) and not around.is_inside(one)
    }
    calls = (one for one in nodes if isinstance(one, ast.Call))
    lines = {one.lineno for one in nodes if isinstance(one, ast.stmt | ast.expr) and is_one(one)}
    return lines | {
        one.lineno for one in calls if ast.unparse(one.func).rpartition(".")[2] in does_it
    }


@dataclass(frozen=True)
class _Around:
    """Two passes and the step after them, by their lines in one file.

    Attributes:
        first: the lines of the first pass.
        last: those of the last one.
        step: those of the step.
        same_loop: whether the innermost `for` loop around the passes has not ended between them.
    """

    first: list[int]
    last: list[int]
    step: list[int]
    same_loop: bool

    def is_inside(self, node: ast.FunctionDef) -> bool:
        """Return whether a pass or the step is called inside of a function."""
        numbers = (*self.first, *self.last, *self.step)
        return any(node.lineno <= n <= (node.end_lineno or n) for n in numbers)

    def not_between(self, suite: list[ast.stmt], *, is_module: bool) -> set[int]:
        """Return the lines of some statements that have not run between the passes.

        Args:
            suite: the statements.
            is_module: whether they are those of the file, which run once.
        """
        of = dict[int, int]()
        for i, one in enumerate(suite):
            of.update(dict.fromkeys(range(one.lineno, (one.end_lineno or one.lineno) + 1), i))
        before = [of[n] for n in self.first if n in of]
        after = [of[n] for n in self.last if n in of]
        stepped = [of[n] for n in self.step if n in of]
        # the innermost statements around the step run together; a module runs once, and a loop that
        # goes on, too
        together = is_module or any(not hasattr(suite[i], "body") for i in stepped)
        if bool(before) != bool(after) or not (together or self._is_one_loop(suite, before, after)):
            return set()
        between = _between(len(suite), before, after)
        return {n for n, i in of.items() if i not in between}

    def _is_one_loop(self, suite: list[ast.stmt], before: list[int], after: list[int]) -> bool:
        if not self.same_loop or not before or before != after:
            return False
        return isinstance(suite[before[0]], ast.For)


def _between(number: int, before: list[int], after: list[int]) -> set[int]:
    """Return the indices of the statements, of so many, that run between two of them.

    None where neither is one of them.
    """
    if not before:
        return set()
    first = before[0]
    last = after[0]
    if first <= last:
        return {*range(first, last + 1)}
    # round the loop that they are the body of
    return {*range(first, number), *range(last + 1)}


_LINE = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')


def in_trace(entries: Iterable[str], *, through_libraries: bool = True) -> str | None:
    """Return the innermost place of the user's own files in a formatted stack, or None.

    Args:
        entries: the stack, outermost frame first.
        through_libraries: whether what a library does that a line of the user's has called is at
            that line; else it is at none.
    """
    for entry in reversed(list(entries)):
        found = _LINE.search(entry)
        if found is None:
            continue
        owner = owner_of(found["file"])
        if owner is Owner.USER:
            return f"{shown_path(found['file'])}:{found['line']}"
        if owner is Owner.LIBRARY and not through_libraries:
            return None
    return None


def _subclasses(kind: type) -> set[type]:
    children: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_subclasses, children))


def live_instances(*kinds: type) -> list[Any]:
    """Return every object of some classes that the garbage collector knows.

    Lazy proxies are not touched.
    """
    # by `type`, not `isinstance`, which reads `__class__` and so would import what a lazy proxy
    # stands for
    wanted = set[type]().union(*map(_subclasses, kinds))
    objects = gc.get_objects()
    # there may be millions of objects, so no Python runs for each
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))
