"""The report as one HTML file that opens offline. Everything but the drawings is escaped."""

from __future__ import annotations

import re
from importlib import resources

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.report.content import Cell, Figure, Report, Table, shown

GOOD = ("holds", "confirmed", "found", "yes")
BAD = ("violated", "refuted", "missed", "no")
WARN = ("conditional", "not run")
_CODE = re.compile(r"`([^`]+)`")


def render(report: Report) -> str:
    """Return the report as one HTML document.

    Raises:
        CannotRunHere: jinja2 is not installed.
    """
    try:
        import jinja2
        import markupsafe
    except ImportError:
        raise CannotRunHere("the HTML report needs jinja2: pip install 'gradcheck-suite[report]'") from None
    template = resources.files("gradcheck_suite.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)

    def cell_class(cell: Cell) -> markupsafe.Markup:
        name = _class(cell)
        return markupsafe.Markup(f' class="{name}"') if name else markupsafe.Markup()

    def svg(figure: Figure) -> markupsafe.Markup:
        # drawn by matplotlib, which escapes the text it is given
        return markupsafe.Markup(figure.svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))

    def prose(text: str) -> markupsafe.Markup:
        return markupsafe.Markup(_CODE.sub(r"<code>\1</code>", str(markupsafe.escape(text))))

    return environment.from_string(template).render(
        report=report, shown=shown, cell_class=cell_class, svg=svg, is_number=_is_number, prose=prose
    )


def _class(cell: Cell) -> str:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return "number"
    if isinstance(cell, str):
        for words, name in ((GOOD, "good"), (BAD, "bad"), (WARN, "warn")):
            if cell in words:
                return name
    return ""


def _is_number(table: Table, column: int) -> bool:
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(_class(cell) == "number" for cell in cells)
