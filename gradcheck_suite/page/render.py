"""A page as HTML and Markdown: templates, pictures, citations."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.util
import json
import os
import re
import sys
import tomllib
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.page.charts import LIGHT, config, style_sheet, with_palette
from gradcheck_suite.page.content import (
    Cell,
    Claim,
    Figure,
    HeadlineAnswer,
    Report,
    Section,
    Table,
    cell_text,
)
from gradcheck_suite.page.violation import ViolationPage

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup


# Links from bugs, as they are cited, to their threads on GitHub.


HOMES = """
huggingface/accelerate huggingface/diffusers huggingface/transformers huggingface/trl
pytorch/opacus pytorch/pytorch pytorch/torchtitan pytorch/torchtune allenai/open-instruct
allenai/rslearn facebookresearch/lingua facebookresearch/mmf NVIDIA/Megatron-LM
NVIDIA/TransformerEngine AMD-AGI/Primus OpenNMT/OpenNMT-py PrimeIntellect-ai/prime-rl
UKPLab/sentence-transformers apache/mxnet bytetriper/RAE deepspeedai/DeepSpeed
dscripka/openWakeWord hiyouga/LlamaFactory karpathy/nanochat keras-team/keras
linkedin/Liger-Kernel luyug/GradCache ml-explore/mlx-lm mlfoundations/open_clip
modelscope/ms-swift open-mmlab/mmcv openai/guided-diffusion rasbt/LLMs-from-scratch
ultralytics/yolov5 unslothai/unsloth
"""
"""Repositories whose bugs are cited by the repository's own name."""
REPOSITORIES = {home.partition("/")[2]: home for home in HOMES.split()} | {
    "Lightning": "Lightning-AI/pytorch-lightning",
    "NeMo Automodel": "NVIDIA-NeMo/Automodel",
    "pytorch/examples": "pytorch/examples",
}
"""What bugs are cited by -> the repository; the last three are cited by another name."""
_CITED = re.compile(
    rf"(?<![\w/-])({'|'.join(map(re.escape, sorted(REPOSITORIES, key=len, reverse=True)))})#(\d+)\b"
)


def with_links(html: str) -> str:
    """Return HTML text in which every cited bug of a known repository is a link that tells no one
    where it was.
    """
    link = '<a href="https://github.com/{}/issues/{}" rel="noreferrer">{}</a>'
    return _CITED.sub(lambda found: link.format(REPOSITORIES[found[1]], found[2], found[0]), html)


# Plots as SVG files, for places that run no script: the Markdown report. Vega draws them, through
# vl-convert.


WIDTH = 640
"""Pixels of a picture; two plots beside each other share it."""
STATIC_WIDTH = 380
"""Pixels of a picture on a page that runs no script, which a telephone shows too."""
AXIS = 70
"""Pixels beside each of such plots."""


_PLACES = re.compile(r' (?:d|transform|x|y|x1|x2|y1|y2|width|height)="[^"]*"')
_DIGITS = re.compile(r"(\.\d)\d+")
_SAID = re.compile(r' (?:aria-[a-z]+|role|class|font-family|pointer-events)="[^"]*"')


def svg(spec: Mapping[str, Any], alt: str) -> str:
    """Return a plot as the text of an SVG file, in light colours on a light ground."""
    return with_palette(_drawing(spec, alt, {"background": LIGHT["card"]}))


def static(figure: Figure) -> Markup:
    """Return a plot for a page that runs no script, in the page's colours.

    Empty where nothing here draws it.
    """
    from markupsafe import Markup

    # the page of a violation is written where only the templates are installed; its tables have the
    # numbers
    if importlib.util.find_spec("vl_convert") is None:
        return Markup("")
    # the element around it says what it shows and has the page's font; a tenth of a pixel is seen
    # by nobody
    drawing = _SAID.sub("", _drawing(figure.spec, figure.alt, {}, STATIC_WIDTH))
    return Markup(_PLACES.sub(lambda place: _DIGITS.sub(r"\1", place[0]), drawing))


def _drawing(
    spec: Mapping[str, Any], alt: str, further: Mapping[str, Any], width: int = WIDTH
) -> str:
    import vl_convert

    # the same specification is drawn by the page's script, at the width of its place
    sized = copy.deepcopy(dict(spec))
    panels = sized.get("hconcat")
    for panel in panels or [sized]:
        panel["width"] = WIDTH // len(panels) - AXIS if panels else width
    drawing = str(vl_convert.vegalite_to_svg({**sized, "config": {**config(), **further}}))
    title = alt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(
        r"(<svg [^>]*>)",
        lambda tag: f"{tag[1]}<title>{title}</title>",
        drawing,
        count=1,
    )


# The short story as Markdown, for a page on GitHub: answers, pictures, claims, violations, where it
# all comes from.


def pictures(report: Report) -> list[Figure]:
    """Return the figures that the Markdown includes."""
    in_answers = chain.from_iterable(answer.figures for answer in report.answers)
    in_sections = chain.from_iterable(section.figures for section in report.sections)
    return [*in_answers, *(figure for figure in in_sections if figure.in_story)]


def report_markdown(report: Report, place: Callable[[Figure], str]) -> str:
    """Return the report as one Markdown document of at most 300 lines.

    Args:
        report: the report.
        place: returns the path of a figure's picture, seen from the Markdown file.
    """
    template = _environment().get_template("report.md.j2")
    return template.render(report=report, place=place).rstrip() + "\n"


def _code(content: str) -> str:
    """Return text that may stand between backticks inside of HTML."""
    return re.sub(r"[`\n<>]", " ", content)


def _escaped(content: str) -> str:
    """Return text in which Markdown and HTML see nothing but text; backticks in pairs stay code."""
    # `split` with a group keeps what it splits at: every second part is code
    parts = re.split(r"(`[^`\n<>|]+`)", content)
    return "".join(
        p if i % 2 else re.sub(r"([\\`*_{}\[\]<>#])", r"\\\1", p) for i, p in enumerate(parts)
    )


def _cell(content: str) -> str:
    return _escaped(content).replace("|", "\\|").replace("\n", "<br>")


# The report, or violations alone, as one HTML file that opens offline.
#
# Nothing in it is fetched, and nothing of a record is executed: templates escape every text, data
# for plots are JSON in which no tag can end, and the page's own policy runs no script but those of
# this package, each by its digest.


GOOD = ("holds", "confirmed", "found", "yes", "current", "True")
BAD = ("violated", "refuted", "missed", "no", "False")
WARN = ("conditional", "not run", "older", "unclean", "unjudged")
SCRIPTS = ("charts.js", "tables.js", "page.js")
_CODE = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"^([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?[*%])*$")
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


PACKAGES = {"jinja2": "jinja2", "markdown_it": "markdown-it-py", "vl_convert": "vl-convert-python"}
"""Module -> the distribution that has it: what a report needs; the page of a violation needs the first alone."""


def expect_installed(what: str, modules: Iterable[str] = PACKAGES) -> None:
    """Refuse to write a page where what it needs is missing.

    Args:
        what: is to be written.
        modules: that it needs, of `PACKAGES`.

    Raises:
        CannotRunHere: one of them is not installed.
    """
    if lacking := [
        PACKAGES[module] for module in modules if importlib.util.find_spec(module) is None
    ]:
        raise CannotRunHere(
            f"{what} needs {' and '.join(lacking)}: pip install 'gradcheck-suite[report]'"
        )


def report_html(report: Report) -> str:
    """Return the report as one HTML document."""
    parts = (
        *report.answers,
        *report.sections,
        *chain.from_iterable(section.claims for section in report.sections),
        *report.violations,
    )
    return _html(
        "report.html.j2",
        parts,
        report=report,
        title=report.title,
    )


def open_page(path: Path) -> bool:
    """Open a file in the browser, and return whether a browser took it.

    Nothing opens in a pipe, as in CI, or on a machine without a desktop: `webbrowser` would start a
    browser of text in the terminal there.
    """
    desktop = sys.platform in ("darwin", "win32") or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
    )
    return bool(desktop) and sys.stdout.isatty() and webbrowser.open(path.resolve().as_uri())


def violations_html(violations: Sequence[ViolationPage], lines: Sequence[str]) -> str:
    """Return the pages of some violations as one HTML document.

    Args:
        violations: in order.
        lines: on the run that found them: versions, one line for each loop.
    """
    loops = ", ".join(dict.fromkeys(page.loop for page in violations))
    titles = ", ".join(dict.fromkeys(page.title for page in violations))
    title = f"{loops}: {titles}" if violations else "No violation"
    return _html(
        "violations.html.j2",
        violations,
        title=title,
        lines=lines,
        violations=violations,
    )


def _html(
    template: str, parts: Iterable[HeadlineAnswer | Section | Claim | ViolationPage], **values: Any
) -> str:
    figures = chain.from_iterable(part.figures for part in parts)
    specs = {figure.key: figure.spec for figure in figures}
    scripts = [*vendored().values(), *(_resource_text("templates", name) for name in SCRIPTS)]
    plots = {"config": config(), "specs": specs}
    from markupsafe import Markup

    return (
        _environment()
        .get_template(template)
        .render(
            **values,
            style=Markup(style_sheet() + _resource_text("templates", "page.css")),
            scripts=[Markup(_checked_script(script)) for script in scripts],
            policy=_policy(scripts),
            plots=Markup(json_for_script(plots)),
        )
    )


@cache
def vendored() -> dict[str, str]:
    """Return the vendored scripts by file name, in the order in which they load, without references
    to source maps.
    """
    names = tomllib.loads(_resource_text("vendor", "vendor.toml"))
    return {name: _SOURCE_MAP.sub("", _resource_text("vendor", name)) for name in names}


def json_for_script(data: Any) -> str:
    """Return JSON that may stand in a script element: no tag, comment or line separator of
    JavaScript in it.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # a browser ends a script element at the first `</script`, wherever in a text it stands
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _checked_script(script: str) -> str:
    assert "</script" not in script.lower(), "a script that ends its own element"
    return script


def _policy(scripts: Iterable[str]) -> str:
    """Return the Content-Security-Policy: these scripts alone, styles of the page, no request to
    anywhere.
    """
    digests = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _resource_text(*path: str) -> str:
    return resources.files("gradcheck_suite.page").joinpath(*path).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup, escape

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _resource_text("templates", name)),
        autoescape=lambda name: not str(name).endswith(".md.j2"),
        # a name that a template misspells is an error, and no empty place on a page
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"text": _escaped, "cell": _cell, "code": _code}
    environment.globals |= {
        "shown": cell_text,
        "static": static,
        "cell_class": cell_class,
        "is_number": _is_number,
        "sort_key": _sort_key,
        "prose": lambda text: Markup(_CODE.sub(r"<code>\1</code>", str(escape(text)))),
        "linked": lambda text: Markup(with_links(str(escape(text)))),
        "document": lambda text: Markup(_markdown(text)),
    }
    return environment


def _markdown(text: str) -> str:
    """Return Markdown as HTML.

    Tags in it stay text, links keep harmless schemes only, headings go two levels down.
    """
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = re.sub(r"<(/?)h([1-4])>", lambda found: f"<{found[1]}h{int(found[2]) + 2}>", html)
    return (
        str(html)
        .replace("<table>", '<div class="scroll" tabindex="0"><table>')
        .replace("</table>", "</table></div>")
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
    """Return what a cell is sorted by: a number with all digits, that of a text such as `1.2e-04
    *`; else nothing.
    """
    if isinstance(cell, str):
        found = _NUMBER.match(cell)
        return found[1].replace(",", "") if found else ""
    return repr(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else ""
