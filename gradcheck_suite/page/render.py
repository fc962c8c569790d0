"""A page as HTML and Markdown: templates, pictures, citations."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.page.charts import LIGHT, config, style_sheet, with_palette
from gradcheck_suite.page.content import Answer, Cell, Claim, Figure, Matrix, Report, Section, Source, Table, shown
from gradcheck_suite.page.violation import ViolationPage

if TYPE_CHECKING:
    import jinja2
    import markupsafe


# Links from bugs, as they are cited, to their threads on GitHub.


HOMES = {
    "accelerate": "huggingface",
    "diffusers": "huggingface",
    "guided-diffusion": "openai",
    "keras": "keras-team",
    "lingua": "facebookresearch",
    "mlx-lm": "ml-explore",
    "mmcv": "open-mmlab",
    "mmf": "facebookresearch",
    "ms-swift": "modelscope",
    "mxnet": "apache",
    "nanochat": "karpathy",
    "opacus": "pytorch",
    "open-instruct": "allenai",
    "openWakeWord": "dscripka",
    "open_clip": "mlfoundations",
    "prime-rl": "PrimeIntellect-ai",
    "pytorch": "pytorch",
    "rslearn": "allenai",
    "sentence-transformers": "UKPLab",
    "torchtitan": "pytorch",
    "torchtune": "pytorch",
    "transformers": "huggingface",
    "trl": "huggingface",
    "unsloth": "unslothai",
    "yolov5": "ultralytics",
    "DeepSpeed": "deepspeedai",
    "GradCache": "luyug",
    "Liger-Kernel": "linkedin",
    "LLMs-from-scratch": "rasbt",
    "LlamaFactory": "hiyouga",
    "Megatron-LM": "NVIDIA",
    "OpenNMT-py": "OpenNMT",
    "Primus": "AMD-AGI",
    "RAE": "bytetriper",
    "TransformerEngine": "NVIDIA",
}
"""Repository on GitHub, as bugs are cited by it -> its owner."""
OTHER_NAMES = {
    "Lightning": "Lightning-AI/pytorch-lightning",
    "NeMo Automodel": "NVIDIA-NeMo/Automodel",
    "pytorch/examples": "pytorch/examples",
}
"""What bugs are cited by -> the repository, where that is not its name."""
REPOSITORIES = {**{name: f"{owner}/{name}" for name, owner in HOMES.items()}, **OTHER_NAMES}
_CITED = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, sorted(REPOSITORIES, key=len, reverse=True)))})#(\d+)\b")


def with_links(html: str) -> str:
    """Return HTML text in which every cited bug of a known repository is a link that tells no one where it was."""
    link = '<a href="https://github.com/{}/issues/{}" rel="noreferrer">{}</a>'
    return _CITED.sub(lambda found: link.format(REPOSITORIES[found[1]], found[2], found[0]), html)


# Plots as SVG files, for places that run no script: the Markdown report. Vega draws them, through vl-convert.


WIDTH = 640
"""Pixels of a picture; two plots beside each other share it."""
AXIS = 70
"""Pixels beside each of such plots."""


def svg(spec: Mapping[str, Any], alt: str) -> str:
    """Return a plot as the text of an SVG file, in light colours on a light ground.

    Raises:
        CannotRunHere: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise CannotRunHere("the report's pictures need vl-convert: pip install 'gradcheck-suite[report]'") from None
    sized = copy.deepcopy(dict(spec))
    panels = sized.get("hconcat")
    for panel in panels or [sized]:
        panel["width"] = WIDTH // len(panels) - AXIS if panels else WIDTH
    drawing = vl_convert.vegalite_to_svg({**sized, "config": {**config(), "background": LIGHT["card"]}})
    title = alt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    named = re.sub(r"(<svg [^>]*>)", lambda tag: f"{tag[1]}<title>{title}</title>", drawing, count=1)
    return with_palette(named)


# The short story as Markdown, for a page on GitHub: answers, pictures, claims, violations, where it all comes from.


PICTURES = (
    "coverage-splits",
    "zoo-totals",
    "detection-float64",
    "detection-bfloat16",
    "architectures",
    "atlas-agreement",
)
"""The plots of sections that stand in the story."""
Place = Callable[[Figure], str]
"""Figure -> the path of its picture, seen from the Markdown file."""


def pictures(report: Report) -> list[Figure]:
    """Return the figures that the Markdown includes."""
    shown = [figure for answer in report.answers for figure in answer.figures]
    return shown + [figure for section in report.sections for figure in section.figures if figure.key in PICTURES]


def markdown_render(report: Report, place: Place) -> str:
    """Return the report as one Markdown document of at most 300 lines.

    Args:
        report: the report.
        place: returns where a figure's picture is.
    """
    lines = [f"# {text(report.title)}", "", f"Made {report.made}. `report.html` has every figure and table.", ""]
    lines += [f"{text(report.subtitle)}.", ""]
    for answer in report.answers:
        lines += _answer(answer, place)
    for section in report.sections:
        if section.tab != "environment" and section.key != "claims":
            lines += _section(section, place)
    if report.violations:
        lines += ["", "## Violations", ""]
        lines += [f"- {text(page.loop)}: {text(page.title)}. {text(page.explanation)}" for page in report.violations]
    if report.problems:
        lines += ["", "## Left out", "", *(f"- {text(problem)}" for problem in report.problems)]
    return "\n".join(lines).rstrip() + "\n"


def _answer(answer: Answer, place: Place) -> list[str]:
    lines = ["", f"## {text(answer.question)}", "", text(answer.answer), ""]
    lines += _matrix(answer.matrix) if answer.matrix else []
    for figure in answer.figures:
        lines += _picture(figure, place)
    lines += _claims(answer.claims)
    return [*lines, *_sources(answer.sources)]


def _section(section: Section, place: Place) -> list[str]:
    lines = [f"## {text(section.title)}", ""]
    if section.missing:
        lines += [f"> {text(section.missing)}", ""]
    lines += [line for paragraph in section.text[:2] for line in (text(paragraph), "")]
    if section.key != "verified":
        for matrix in section.matrices:
            lines += _matrix(matrix)
    for figure in section.figures:
        lines += _picture(figure, place) if figure.key in PICTURES else []
    lines += [f"- {text(document.title)}" for document in section.documents]
    return [*lines, *_sources(section.sources)]


def _matrix(matrix: Matrix) -> list[str]:
    lines = [f"{text(matrix.caption)}:", ""]
    lines.append(f"| {' | '.join(map(_cell, (matrix.corner, *matrix.columns)))} |")
    lines.append(f"|{' --- |' * (1 + len(matrix.columns))}")
    for name, cells in matrix.rows:
        lines.append(f"| {' | '.join(map(_cell, (name, *(', '.join(filter(None, said)) for _, said in cells))))} |")
    return [*lines, "", *(f"- {text(note)}" for note in matrix.notes), *([""] if matrix.notes else [])]


def _claims(claims: tuple[Claim, ...]) -> list[str]:
    if not claims:
        return []
    rows = (f"| {_cell(claim.number)} | {_cell(claim.text)} | {_cell(claim.verdict)} |" for claim in claims)
    return ["| | claim | verdict |", "| --- | --- | --- |", *rows, ""]


def _picture(figure: Figure, place: Place) -> list[str]:
    return [f"![{text(figure.alt)}]({place(figure)})", "", text(figure.caption), ""]


def _sources(sources: tuple[Source, ...]) -> list[str]:
    if not sources:
        return []
    newest = sources[0]
    said = [f"`{code(newest.command)}`" if newest.command else "command unknown", newest.date or "date unknown"]
    said += [f"commit {newest.commit}" if newest.commit else "commit unknown", newest.machine or "machine unknown"]
    marks = ["older than the code it speaks of"] if any(source.older for source in sources) else []
    marks += ["uncommitted changes"] if any(source.unclean for source in sources) else []
    more = f"; {len(sources) - 1} more in `report.html`" if len(sources) > 1 else ""
    return [f"<sub>{said[0]}, {', '.join(map(text, said[1:]))}{more}{''.join(f'. **{m}**' for m in marks)}</sub>", ""]


def _cell(content: str) -> str:
    return text(content).replace("|", "\\|").replace("\n", "<br>")


def code(content: str) -> str:
    """Return text that may stand between backticks inside of HTML."""
    return re.sub(r"[`\n<>]", " ", content)


def text(content: str) -> str:
    """Return text in which Markdown and HTML see nothing but text; backticks in pairs stay code."""
    parts = re.split(r"(`[^`\n<>|]+`)", content)
    return "".join(p if i % 2 else re.sub(r"([\\`*_{}\[\]<>#])", r"\\\1", p) for i, p in enumerate(parts))


# The report, or violations alone, as one HTML file that opens offline.
#
# Nothing in it is fetched, and nothing of a record is executed: templates escape every text, data for plots are JSON
# in which no tag can end, and the page's own policy runs no script but those of this package, each by its digest.


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


def page_render(report: Report) -> str:
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
    return resources.files("gradcheck_suite.page").joinpath(*path).read_text(encoding="utf-8")


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
