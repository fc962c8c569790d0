"""The statement that a mutant changes, as `ast.unparse` writes it: formatting and line numbers do not matter."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence

_HUNK = re.compile(r"@@ -(\d+)")
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def apply(diff: Sequence[str], source: str) -> str:
    """Return the source with a unified diff applied."""
    lines = source.split("\n")
    changed, at = [], 0
    for text in diff:
        if hunk := _HUNK.match(text):
            start = int(hunk[1]) - 1
            changed += lines[at:start]
            at = start
        elif text.startswith(("---", "+++")):
            continue
        elif text.startswith("+"):
            changed.append(text[1:])
        elif text.startswith("-"):
            at += 1
        elif text.startswith(" "):
            changed.append(lines[at])
            at += 1
    return "\n".join(changed + lines[at:])


def changed_statement(before: str, after: str) -> tuple[str, str]:
    """Return the innermost statement in which two versions of a module differ, as it stands in each.

    Of a statement with a body, only the head is returned. Text that is no Python is returned as it is.
    """
    try:
        return _differing(ast.parse(before), ast.parse(after))
    except SyntaxError:
        pairs = zip(before.split("\n"), after.split("\n"), strict=False)
        return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))


def statements(source: str) -> Iterator[str]:
    """Yield every statement of a module as `changed_statement` writes it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield _head(node)


def _differing(before: ast.AST, after: ast.AST) -> tuple[str, str]:
    head = _head(before), _head(after)
    if head[0] == head[1]:
        for name in _BODIES:
            inner, changed = (getattr(node, name, []) for node in (before, after))
            if len(inner) == len(changed):
                for a, b in zip(inner, changed, strict=True):
                    if ast.dump(a) != ast.dump(b):
                        return _differing(a, b)
    return head


def _head(node: ast.AST) -> str:
    """Return a statement in one line, without its body."""
    if isinstance(node, ast.Module):
        return ""
    head = copy.copy(node)
    for name in _BODIES:
        if hasattr(head, name):
            setattr(head, name, [])
    return " ".join(ast.unparse(head).split())
