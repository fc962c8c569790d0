"""The report, or violations alone, as one HTML file that opens offline.

Nothing in it is fetched, and nothing of a record is executed: templates escape every text, data for plots are JSON in
which no tag can end, and the page's own policy runs no script but those of this package, each by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.report.charts.theme import config, style_sheet
from gradcheck_suite.report.citations import with_links
from gradcheck_suite.report.content import Cell, Figure, Report, Table, shown
from gradcheck_suite.report.violation import ViolationPage

if TYPE_CHECKING:
    import jinja2
    import markupsafe

GOOD = ("holds", "confirmed", "found", "yes", "current", "True")
BAD = ("violated", "refuted", "missed", "no", "False")
WARN = ("conditional", "not run", "older", "unclean", "unjudged")
SCRIPTS = ("charts.js", "tables.js", "page.js")
_CODE = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"^([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?[*%])*$")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


def expect_installed() -> None:
    """Refuse to write a page where what it needs is missing.

    Raises:
        CannotRunHere: jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise CannotRunHere("the HTML report needs jinja2: pip install 'gradcheck-suite[report]'")


def render(report: Report) -> str:
    """Return the report as one HTML document.

    Raises:
        CannotRunHere: jinja2 is not installed.
    """
    figures = [
        *(figure for answer in report.answers for figure in answer.figures),
        *(figure for section in report.sections for figure in section.figures),
        *(figure for section in report.sections for claim in section.claims for figure in claim.figures),
        *(figure for violation in report.violations for figure in violation.figures),
    ]
    return _rendered("report.html.j2", figures, report=report, title=report.title)


def render_violations(title: str, lines: Sequence[str], violations: Sequence[ViolationPage]) -> str:
    """Return the pages of some violations as one HTML document.

    Args:
        title: of the document.
        lines: on the run that found them: versions, one line for each loop.
        violations: in order.

    Raises:
        CannotRunHere: jinja2 is not installed.
    """
    figures = [figure for violation in violations for figure in violation.figures]
    return _rendered("violations.html.j2", figures, title=title, lines=lines, violations=violations)


def _rendered(template: str, figures: Iterable[Figure], **values: Any) -> str:
    environment = _environment()
    specs: dict[str, Any] = {}
    for figure in figures:
        specs[figure.key] = figure.spec
    scripts = [*vendored().values(), *(_text("templates", name) for name in SCRIPTS)]
    plots = {"config": config(), "specs": specs}
    import markupsafe

    return environment.get_template(template).render(
        **values,
        style=markupsafe.Markup(style_sheet() + _text("templates", "page.css")),
        scripts=[markupsafe.Markup(_checked_script(script)) for script in scripts],
        policy=_policy(scripts),
        plots=markupsafe.Markup(json_for_script(plots)),
    )


@cache
def vendored() -> dict[str, str]:
    """Return the vendored scripts by file name, in the order in which they load, without references to source maps."""
    names = tomllib.loads(_text("vendor", "vendor.toml"))
    return {name: _SOURCE_MAP.sub("", _text("vendor", name)) for name in names}


def json_for_script(data: Any) -> str:
    """Return JSON that may stand in a script element: no tag, comment or line separator of JavaScript in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _checked_script(script: str) -> str:
    assert "</script" not in script.lower(), "a script that ends its own element"
    return script


def _policy(scripts: Iterable[str]) -> str:
    """Return the Content-Security-Policy: these scripts alone, styles of the page, no request to anywhere."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _text(*path: str) -> str:
    return resources.files("gradcheck_suite.report").joinpath(*path).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    expect_installed()
    import jinja2
    import markupsafe

    def prose(text: str) -> markupsafe.Markup:
        return markupsafe.Markup(_CODE.sub(r"<code>\1</code>", str(markupsafe.escape(text))))

    def linked(text: str) -> markupsafe.Markup:
        return markupsafe.Markup(with_links(str(markupsafe.escape(text))))

    def document(text: str) -> markupsafe.Markup:
        return markupsafe.Markup(_markdown(text))

    loader = jinja2.FunctionLoader(lambda name: _text("templates", name))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "shown": shown,
        "cell_class": cell_class,
        "is_number": _is_number,
        "sort_key": _sort_key,
        "prose": prose,
        "linked": linked,
        "document": document,
    }
    return environment


def _markdown(text: str) -> str:
    """Return Markdown as HTML; tags in it stay text, links keep harmless schemes only, headings go two levels down."""
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = re.sub(r"<(/?)h([1-4])>", lambda found: f"<{found[1]}h{int(found[2]) + 2}>", html)
    return (
        str(html).replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    )


def cell_class(cell: Cell) -> str:
    """Return the class of a table's cell: `number`, `good`, `bad`, `warn` or none."""
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return "number"
    for words, name in ((GOOD, "good"), (BAD, "bad"), (WARN, "warn")):
        if str(cell) in words:
            return name
    return ""


def _is_number(table: Table, column: int) -> bool:
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(cell_class(cell) == "number" for cell in cells)


def _sort_key(cell: Cell) -> str:
    """Return what a cell is sorted by: a number with all digits, that of a text such as `1.2e-04 *`; else nothing."""
    if isinstance(cell, str):
        found = _NUMBER.match(cell)
        return found[1].replace(",", "") if found else ""
    return repr(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else ""
