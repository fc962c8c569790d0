"""The statement that a mutant changes, as `ast.unparse` writes it: formatting and line numbers do
not matter.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from itertools import pairwise

_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ORDERS = {"Lt", "LtE", "Gt", "GtE"}
_IDENTITY = {"Is", "IsNot"}
_BITS = {"BitAnd", "BitOr", "BitXor", "LShift", "RShift"}
Place = tuple[int, int]


class Code:
    """A module's text, of which not every mutant is worth a test.

    Under `from __future__ import annotations` no annotation is evaluated, and of a function's
    signature only the defaults are: `*` in it is how arguments are passed. `strict=True` asserts
    what holds. Names are equal or not, and have no order; whether equal objects are one rests on
    Python. Bits and arithmetic take each other's place nowhere: a float has no bits, and what
    follows is a TypeError.
    """

    def __init__(self, source: str) -> None:
        self._silent: list[tuple[Place, Place]] = []
        self._defaults: list[tuple[Place, Place]] = []
        self._of_names: list[tuple[Place, Place]] = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign):
                self._silent.append(_span(node.annotation))
            elif isinstance(node, ast.keyword) and node.arg == "strict":
                self._silent.append(_span(node.value))
            elif isinstance(node, _FUNCTIONS):
                self._silent.append(((node.lineno, node.col_offset), _span(node.body[0])[0]))
                values = (*node.args.defaults, *node.args.kw_defaults)
                self._defaults += [_span(value) for value in values if value is not None]
            elif isinstance(node, ast.Compare):
                operands = (node.left, *node.comparators)
                self._of_names += [
                    (_span(a)[1], _span(b)[0])
                    for a, b in pairwise(operands)
                    if any(_is_name(x) for x in (a, b))
                ]

    def tells(self, operator: str, start: Place, end: Place) -> bool:
        """Whether a test may tell the mutant that Cosmic Ray's operator makes from `start` to
        `end`, (line, column).
        """

        def is_within(spans: list[tuple[Place, Place]]) -> bool:
            return any(first <= start and end <= last for first, last in spans)

        if is_within(self._silent) and not is_within(self._defaults):
            return False
        if not (replaced := re.search("Replace(?:Comparison|Binary)Operator_(.+)_(.+)", operator)):
            return True
        for kind in (_IDENTITY, _BITS):
            if len(kind.intersection(replaced.groups())) == 1:
                return False
        return replaced[2] not in _ORDERS or not is_within(self._of_names)


def changed_statement(before: str, after: str) -> tuple[range, str, str]:
    """Return the innermost statement in which two versions of a module differ, as it stands in
    each, after its lines.

    Of a statement with a body, only the head is returned. No lines are returned of a statement
    outside functions, which is executed once, when the module is imported.
    """
    return _differing(ast.parse(before), ast.parse(after), within=False)


def statements(source: str) -> Iterator[str]:
    """Yield every statement of a module as `changed_statement` writes it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield _head(node)


def _span(node: ast.expr | ast.stmt) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (
        node.end_lineno or node.lineno,
        node.end_col_offset or 0,
    )


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _differing(before: ast.AST, after: ast.AST, *, within: bool) -> tuple[range, str, str]:
    head, changed_head = _head(before), _head(after)
    if head == changed_head:
        for name in _BODIES:
            inner, changed = (getattr(node, name, []) for node in (before, after))
            if len(inner) == len(changed):
                for a, b in zip(inner, changed, strict=True):
                    if ast.dump(a) != ast.dump(b):
                        return _differing(a, b, within=within or isinstance(before, _FUNCTIONS))
    body = next((getattr(before, name) for name in _BODIES if getattr(before, name, None)), None)
    lines = range(0)
    if within and not isinstance(before, _FUNCTIONS):
        first, last = _span(before)
        lines = range(first[0], _span(body[0])[0][0] if body else last[0] + 1) or range(
            first[0], first[0] + 1
        )
    return lines, head, changed_head


def _head(node: ast.AST) -> str:
    """Return a statement in one line, without its body."""
    if isinstance(node, ast.Module):
        return ""
    head = copy.copy(node)
    for name in _BODIES:
        if hasattr(head, name):
            setattr(head, name, [])
    return " ".join(ast.unparse(head).split())
