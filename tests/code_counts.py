"""Print the size of the package and of its tests, and how its modules depend on each other: `tox -e lint` calls it.

A line of code is a line that holds a token other than a comment or a docstring.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gradcheck_suite"
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Return the number of lines of a module that are neither blank, nor comment, nor docstring."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def importers() -> dict[str, set[str]]:
    """Return, for each module of the package that is no `__init__`, the modules that import it, lazily or not."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / PACKAGE).rglob("*.py")}
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                taken = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                taken = [alias.name for alias in node.names]
            else:
                continue
            for module in taken:
                if module in modules and module != name:
                    found[module].add(name)
    return {name: found[name] for name in modules if not name.endswith("__init__")}


def main() -> None:
    """Print the counts."""
    package = sorted((ROOT / PACKAGE).rglob("*.py"))
    tests = [path for folder in ("tests", "properties") for path in sorted((ROOT / folder).rglob("*.py"))]
    single = [name for name, by in importers().items() if len(by) == 1]
    print(f"{PACKAGE}: {len(package)} files, {sum(code_lines(path.read_text()) for path in package):,} lines of code")
    print(f"modules that one other imports: {len(single)}")
    print(f"tests and properties: {len(tests)} files, {sum(code_lines(p.read_text()) for p in tests):,} lines of code")


if __name__ == "__main__":
    main()
