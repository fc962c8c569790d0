"""The user's source lines: what computes the loss, sends it backward and steps, and what must change.

The lines are found by the syntax of the loop and of the functions of its file that it calls. Where
the syntax does not tell, no line is marked.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gradcheck_suite.core.faults import FAULTS, FIX, names_of, remedy_of
from gradcheck_suite.core.records import PACKAGE
from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.text import cell_lines, file_text

MARGIN = 3
"""Lines that are shown before the first and after the last marked one of a script."""
MOST_LINES = 60
OF_LOSS = re.compile(r"loss|criterion|objective|entropy", re.IGNORECASE)
"""Names of functions that compute losses."""
GRADIENTS_OF_JAX = ("grad", "value_and_grad", "vjp")
Definition = ast.FunctionDef | ast.AsyncFunctionDef


def _last_name(node: ast.AST | None) -> str:
    """Return the last part of a name or an attribute, empty for anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _is_scaled(expression: ast.AST | None) -> bool:
    """Whether an expression multiplies or divides something."""
    return expression is not None and any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
        for node in ast.walk(expression)
    )


@dataclass(frozen=True)
class Assigned:
    """A statement that gives a name a value, or adds one to a list of that name.

    Attributes:
        line: its number.
        value: the value.
    """

    line: int
    value: ast.expr


class LoopSyntax:
    """What the syntax of a loop says.

    Attributes:
        first: the number of the line with its `def`.
        helpers: the lines of each function of its file that it calls.
    """

    def __init__(self, loop: Definition, helpers: Mapping[str, Definition]) -> None:
        """Read a loop.

        Args:
            loop: its definition.
            helpers: the functions of its file that it calls, by name.
        """
        self.first = loop.lineno
        self._parts: list[Definition] = [loop, *helpers.values()]
        self.helpers = [range(h.lineno, (h.end_lineno or h.lineno) + 1) for h in helpers.values()]
        # `loss = step_loss(batch)` is a loss where the helper computes one
        self._of_loss = {name for name, body in helpers.items() if self._has_loss(body)}
        self._assigned: dict[str, list[Assigned]] = {}
        for part in self._parts:
            for name, assigned in _assignments(part):
                self._assigned.setdefault(name, []).append(assigned)

    def _has_loss(self, tree: ast.AST) -> bool:
        return any(OF_LOSS.search(_last_name(call.func)) for call in _calls_in(tree))

    def _computes_loss(self, call: ast.Call) -> bool:
        name = _last_name(call.func)
        return bool(OF_LOSS.search(name)) or name in self._of_loss

    def sent(self) -> list[tuple[int, ast.expr]]:
        """Return what goes backward, with the number of its line."""
        found = []
        for call in self._each_call("backward"):
            receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
            is_loss = receiver is not None and any(
                self._losses_in(assigned.value)
                for assigned in self._assigned.get(_last_name(receiver), ())
            )
            # `accelerator.backward(loss)` sends its argument, `loss.backward(weights)` its receiver
            what = call.args[0] if call.args and not is_loss else receiver
            if what is not None:
                found.append((call.lineno, what))
        return found

    def _each_call(self, *names: str) -> list[ast.Call]:
        """Return calls of functions or methods of these names: of the loop's own, else of its
        helpers.
        """
        for part in self._parts:
            # a loop that calls `backward` itself is read by that; its helpers may do so for another
            # reason
            if found := [call for call in _calls_in(part) if _last_name(call.func) in names]:
                return found
        return []

    def _losses_in(self, expression: ast.AST) -> list[ast.Call]:
        return [call for call in _calls_in(expression) if self._computes_loss(call)]

    def _names(self, expression: ast.AST) -> list[str]:
        """Return the names whose values are in an expression, without the arguments of losses."""
        inside = set[int]()
        for call in self._losses_in(expression):
            # what a loss is computed of is no part of the way from the loss to backward
            for argument in (call.func, *call.args, *call.keywords):
                inside.update(map(id, ast.walk(argument)))
        return [
            node.id
            for node in ast.walk(expression)
            if isinstance(node, ast.Name) and id(node) not in inside
        ]

    def _chain(self) -> list[Assigned]:
        """Return the assignments through which a loss reaches backward, the last one first."""
        chain: list[Assigned] = []
        for _, expression in self.sent():
            names = self._names(expression)
            seen = set[str]()
            # a loss that is computed in the call itself has no name to follow
            if self._losses_in(expression):
                continue
            while names:
                name = names.pop(0)
                # `loss = loss / n` names itself
                if name in seen:
                    continue
                seen.add(name)
                for assigned in self._assigned.get(name, ()):
                    if self._reaches_loss(assigned.value, set()):
                        chain.append(assigned)
                        names += self._names(assigned.value)
        return chain

    def _reaches_loss(self, expression: ast.AST, seen: set[str]) -> bool:
        if self._losses_in(expression):
            return True
        names = [name for name in self._names(expression) if name not in seen]
        seen.update(names)
        assigned = chain.from_iterable(self._assigned.get(name, ()) for name in names)
        return any(self._reaches_loss(each.value, seen) for each in assigned)

    def marks(self) -> dict[int, str]:
        """Return what happens at a line: `loss`, `backward` or `step`, by its number."""
        steps = self._each_call("step")
        backward = {line: "backward" for line, _ in self.sent()}
        found = {**{call.lineno: "step" for call in steps}, **backward}
        # neither `backward` nor `step`: a loop of JAX has gradients as values
        if not found:
            return self._marks_of_jax()
        for assigned in self._chain():
            if self._losses_in(assigned.value):
                found.setdefault(assigned.line, "loss")
        return found

    def _marks_of_jax(self) -> dict[int, str]:
        # `optimizer.update(gradients, state)`; `dict.update` has one argument
        updates = [call for call in self._each_call("update") if len(call.args) > 1]
        found = {call.lineno: "step" for call in updates}
        for call in self._each_call(*GRADIENTS_OF_JAX):
            found.setdefault(call.lineno, "backward")
        for node in chain.from_iterable(map(ast.walk, self._parts)):
            if isinstance(node, ast.Attribute) and node.attr == "loss":
                found.setdefault(node.lineno, "loss")
        return found

    def scaled(self) -> int | None:
        """Return the last line that multiplies or divides the loss on its way backward."""
        sent = [line for line, expression in self.sent() if _is_scaled(expression)]
        if sent:
            return sent[-1]
        return next((part.line for part in self._chain() if _is_scaled(part.value)), None)

    def reset(self) -> int | None:
        """Return the line that resets gradients, where there is one alone."""
        return self._only_call("zero_grad")

    def clip(self) -> int | None:
        """Return the line that clips gradients, where there is one alone."""
        return self._only_call("clip")

    def _only_call(self, part: str) -> int | None:
        # a helper may be right, and be used wrongly
        calls = [call for call in _calls_in(self._parts[0]) if part in _last_name(call.func)]
        return calls[0].lineno if len(calls) == 1 else None


def _assignments(part: Definition) -> Iterator[tuple[str, Assigned]]:
    for node in ast.walk(part):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            # `a = b = value` has several targets
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            if value is None:  # `x: int` declares and assigns nothing
                continue
            for target in targets:
                names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
                yield from ((name, Assigned(node.lineno, value)) for name in names)
        elif (
            isinstance(node, ast.Call)
            and _last_name(node.func) in ("append", "extend")
            and node.args
        ):
            assert isinstance(node.func, ast.Attribute | ast.Name)
            holder = getattr(node.func, "value", None)
            yield _last_name(holder), Assigned(node.lineno, node.args[0])


def _syntax(loop: Any) -> LoopSyntax | None:
    """Return the syntax of a loop, with the functions of its file that it calls; None without."""
    function = inspect.unwrap(loop)
    try:
        file = inspect.getsourcefile(function) or ""
        lines, _ = inspect.findsource(function)
        first = function.__code__.co_firstlineno
        # the whole file: the helpers that a loop calls stand beside it
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None
    if not file:
        return None
    functions = [node for node in ast.walk(tree) if isinstance(node, Definition)]
    # the code of a decorated function begins at its first decorator
    starts = {
        min([node.lineno, *(d.lineno for d in node.decorator_list)]): node for node in functions
    }
    own = starts.get(first)
    if own is None:
        return None
    return LoopSyntax(own, _helpers_of(own, tree))


def _helpers_of(own: Definition, tree: ast.Module) -> dict[str, Definition]:
    """Return the functions of a file that a function calls, and those that they call."""
    top = {node.name: node for node in tree.body if isinstance(node, Definition)}
    helpers: dict[str, Definition] = {}
    waiting = [own]
    while waiting:
        inside = ast.walk(waiting.pop(0))
        for name in [_last_name(node) for node in inside if isinstance(node, ast.Name)]:
            if name in top and name not in helpers and top[name] is not own:
                helpers[name] = top[name]
                waiting.append(top[name])
    return helpers


def loop_source(loop: Any) -> dict[str, Any] | None:
    """Return the lines of a loop as JSON-ready data.

    None where it has no source, as a trainer's loop has none of one. `marks` has the number of each
    line that calls `backward` or `step`, and of those that compute what goes backward.
    """
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(loop))
        ast.parse(textwrap.dedent("".join(lines)))
        file = file_text(inspect.getsourcefile(inspect.unwrap(loop)) or "")
    except (OSError, TypeError, SyntaxError):
        return None
    syntax = _syntax(loop)
    return _source(Path(file).name, first, lines, {} if syntax is None else syntax.marks())


def loop_places(loop: Any, violation: Violation) -> dict[str, Any]:
    """Return where a loop computes its loss, sends it backward and steps, and which line must
    change, under the names of `Violation`'s fields.

    Of several calls it is the last one, and the loop's own first line where it calls neither.
    """
    syntax = _syntax(loop)
    place = loop_lines(loop)
    if place is None:
        return {}
    file, span = place
    if syntax is None:
        return {"where": f"{file}:{span.start}"} if loop_source(loop) else {}
    marks = syntax.marks()
    lines = {mark: f"{file}:{number}" for number, mark in sorted(marks.items())}
    fields = {"where": "loss", "backward": "backward", "stepped": "step"}
    found = {name: lines.get(mark) for name, mark in fields.items()}
    if not lines:
        found["where"] = f"{file}:{syntax.first}"
    change = _line_to_change(syntax, violation, Path(file).name)
    return found if change is None else {**found, "to_change": f"{file}:{change}"}


OF_WEIGHTS = ("mean-of-means", "wrong-scale", "wrong-count", "weighted-by-place")
"""Faults of the number that a loss is multiplied by."""
OF_RESETS = ("reset-inside-window", "stale-window", "tail-leak")
CHANGES: tuple[tuple[tuple[str, ...], Callable[[LoopSyntax], int | None]], ...] = (
    (OF_WEIGHTS, LoopSyntax.scaled),
    (OF_RESETS, LoopSyntax.reset),
    (("clipped",), LoopSyntax.clip),
)
"""Faults, and what finds the line that makes them."""


def _line_to_change(syntax: LoopSyntax, violation: Violation, file: str) -> int | None:
    """Return the line that must change, where the fault says which it is."""
    raised = re.search(rf"\({re.escape(file)}, line (\d+)\)", violation.explanation)
    if violation.kind == "raised" and raised:
        return int(raised[1])
    names = names_of(violation.diagnosis) & FAULTS.keys()
    _, has_remedy, remedy = violation.explanation.partition(FIX)
    of_resets = bool(names) and names <= {*OF_RESETS}
    # a cause of its own, such as a moving average, is on another line than the reset
    if of_resets and has_remedy and remedy_of(violation.diagnosis) not in remedy:
        return None
    finds = (find for known, find in CHANGES if names and names <= {*known})
    lines = (find(syntax) for find in finds)
    return next((line for line in lines if line is not None), None)


def loop_lines(loop: Any) -> tuple[str, range] | None:
    """Return the file of a loop, as seen from the working directory, and its lines.

    None for a loop of the suite.
    """
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(loop))
        path = inspect.getsourcefile(inspect.unwrap(loop)) or ""
    except (OSError, TypeError):
        return None
    if Path(path).is_relative_to(PACKAGE):
        return None
    file = file_text(path)
    if file == path and Path(path).is_relative_to(Path.cwd()):
        file = str(Path(path).relative_to(Path.cwd()))
    return file, range(first, first + len(lines))


def judged_lines(loop: Any) -> tuple[tuple[str, range], ...]:
    """Return the file and the lines of a loop, and of each function of its file that it calls.

    Empty for a loop of the suite.
    """
    place = loop_lines(loop)
    syntax = _syntax(loop)
    if place is None:
        return ()
    file, span = place
    helpers = syntax.helpers if syntax else ()
    return ((file, span), *((file, lines) for lines in helpers))


def places_source(places: Mapping[str, str | None], folder: Path) -> dict[str, Any] | None:
    """Return the lines of a script around some places, which are all in the file of the first one.

    Args:
        places: `loss`, `backward` and `step` -> `file:line`, or None.
        folder: that the files are relative to.
    """
    marks: dict[int, str] = {}
    file = ""
    for name, place in places.items():
        # the last one is the user's own, of what a library does for it
        where, _, line = (place or "").rpartition(" < ")[2].rpartition(":")
        if line.isdigit() and where == (file or where):
            file = where
            before = marks.get(int(line))
            marks[int(line)] = name if before is None else f"{before}, {name}"
    try:
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = cell_lines(file)  # a notebook's cell is no file
    if not marks or not lines:
        return None
    first = max(1, min(marks) - MARGIN)
    return _source(file, first, lines[first - 1 : max(marks) + MARGIN], marks)


def _source(
    file: str, first: int, lines: Sequence[str], marks: Mapping[int, str]
) -> dict[str, Any]:
    """Return some lines; of more than `MOST_LINES` those around the marked ones."""
    shown = {n: line.rstrip() for n, line in enumerate(lines, first)}
    if len(shown) > MOST_LINES:
        near = {n for n in shown if any(abs(n - marked) <= MARGIN for marked in marks)}
        shown = {n: shown[n] for n in sorted(near)}
    rows = [[n, line, marks.get(n, "")] for n, line in shown.items()]
    return {"file": file, "lines": rows}
