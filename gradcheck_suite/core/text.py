"""Results in words, and how words are printed: counts with nouns, weights with bars, verdicts as text and as HTML."""

from __future__ import annotations

import html
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from gradcheck_suite.core.contract import DECLARED

if TYPE_CHECKING:
    from gradcheck_suite.core.case import Plan
    from gradcheck_suite.core.results import LiveResult, LiveViolation, Result, Violation

# Counts with their nouns, names and texts in two columns, names that were meant. Imports neither framework.


def aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each pair of a name and a text, with the texts in one column."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in pairs]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 window` or `2 micro-batches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


OF_JAX = {
    "the loop changed the model's parameters: ": "",
    "optimizer.step() was called": "the result of run.optimizer.update was used",
    "run.optimizer was never stepped": "no result of run.optimizer.update is used",
    "step run.optimizer, or wrap it": "update by run.optimizer, or wrap it",
    "something other than optimizer.step() changed": "something other than the optimizer's updates changed",
    ".grad is not finite at the step, the right gradient is": "'s gradient is not finite at the step, the right one is",
    "what was in .grad before": "what was in the sum before",
    "pass over run.loader": "pass over run.batches",
    "in the loader's order": "in the order of run.batches",
    "the running sum of the losses goes through backward each time; send each loss through once": "the running sum of "
    "the losses is differentiated each time; differentiate each loss once",
    "send each loss backward once": "differentiate each loss once",
    "send each backward once": "add each gradient once",
    "send a micro-batch backward after": "differentiate a micro-batch after",
    "look for a reset after its backward": "look for a new sum after its gradient",
    "the window's last backward": "the window's last gradient",
    "reset with zero_() or None, since": "start at new zeros, since",
    "(a flag, no_sync, a detached graph)": "(a flag, a carry that is not handed on, stop_gradient)",
    "such as a hook that is registered anew and never removed": "such as a factor that stays in a state",
    "look for a coefficient, a schedule, a hook": "look for a coefficient or a schedule",
    "clip_grad_norm_ with a finite limit": "optax.clip_by_global_norm with a finite limit",
    "a GradScaler skips the step of a window whose gradients overflow: where the loop has one, give it a smaller "
    "init_scale; otherwise look for": "look for",
    "uses a torch.amp.GradScaler, whose skips are allowed, or states": "states",
    "a generator that torch's seed does not set": "a generator that no seed of its own sets",
    "look for a copy of the model that is not updated, and for a forward that runs before the previous step": "look "
    "for parameters that a compiled function closes over, and for a gradient that is computed before the previous step",
    "a backward (a custom autograd.Function, a hook)": "a backward (a custom_vjp)",
    "send the losses of all micro-batches backward with": "differentiate the losses of all micro-batches with",
}
"""What explanations say of torch -> what they say of a loop of JAX."""


def of_jax(text: str) -> str:
    """Return an explanation in the words of JAX."""
    for torchs, own in OF_JAX.items():
        text = text.replace(torchs, own)
    return text


MOST_SHOWN = 24
"""Micro-batches of an epoch that are shown one by one."""


def split_text(plan: Plan) -> str:
    """Return an epoch's item counts by window, such as `[1 3 | 2* 2 | 4]`; `*` marks one without valid targets.

    `[1 3 / 2 | 1 / -]` is that of two ranks, of which the second has fewer micro-batches and at last none. In a plan
    of many micro-batches equal neighbours are counted: `[85 x (1 1 1) | 1 1]`, `[33 x 1]`.
    """
    shown = [f"{n}*" if j in plan.masked else str(n) for j, n in enumerate(plan.micro_batches)]
    windows = [[shown[j] for j in window] for window in plan.windows]
    if plan.ranks:
        members = [plan.of_rank(rank) for rank in range(plan.world_size)]
        windows = [
            " / ".join(" ".join(shown[j] for j in window if j in own) or "-" for own in members).split(" ")
            for window in plan.windows
        ]
    if len(shown) <= MOST_SHOWN:
        return f"[{' | '.join(map(' '.join, windows))}]"
    texts = [" ".join(_runs(window, 6)) for window in windows]
    return f"[{' | '.join(_runs(texts, 3))}]"


def _runs(texts: Iterable[str], least: int) -> list[str]:
    """Return texts with equal neighbours, if there are at least so many, written once with their number."""
    runs = [(text, len(list(run))) for text, run in groupby(texts)]
    return [
        part
        for text, times in runs
        for part in (
            [f"{times} x ({text})" if " " in text else f"{times} x {text}"] if times >= least else [text] * times
        )
    ]


def cut_text(plan: Plan) -> str:
    """Return a plan in a few characters, such as `[1 2 | 1] K=2, 2 epochs`."""
    epochs = f", {plan.epochs} epochs" if plan.epochs > 1 else ""
    return f"{split_text(plan)} K={plan.accumulation_steps}{epochs}"


def suggestion(name: str, names: Iterable[str], *, most: int = 1) -> str:
    """Return ` (did you mean 'verify'?)` where a name is close to one that exists, else nothing."""
    close = get_close_matches(name, [n for n in names if not n.startswith("__")], n=most)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def file_text(filename: str) -> str:
    """Return a source file as its user names it: a cell of a notebook as IPython does, `Cell In[3]`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell and shell.compile.format_code_name(filename)
    return " ".join(cell) if cell else filename


def percent(share: float) -> str:
    """Return a share as a percentage of three digits."""
    return "less than 0.1%" if share < 1e-3 else f"{100 * share:.3g}%"


def of_bound(ratio: float) -> str:
    """Return an error over its bound in words: `91% of the rounding bound`; two digits where they do not say 100."""
    return f"{100 * ratio:.{2 if ratio < 0.995 else 4}g}% of the rounding bound"


SURE_VIOLATION = 100
"""Error over bound from which on the digits of the bound decide nothing: one of them is printed."""


def error_text(error: float, allowed: float) -> str:
    """Return an error beside its bound, such as `0.205, where rounding allows 7e-15`.

    The bound has three digits where the error is close to it. Far below the error it has one: its further digits are
    rounding error themselves and differ between processors.

    Args:
        error: |observed - expected|, in the units of the gradient.
        allowed: the largest error that rounding explains, in the same units.
    """
    digits = 1 if error > SURE_VIOLATION * allowed else 3
    return f"{error:.3g}, where rounding allows {allowed:.{digits}g}"


# Print lines: in colour on a terminal, where long ones are wrapped at words.


STYLES = {"good": "bold green", "bad": "bold red", "warn": "bold yellow", "label": "cyan"}
_COLOURED = (
    r"^\S.*?  (?:(?P<good>holds(?: so far \(interrupted\))?)|(?P<bad>VIOLATED)|(?P<warn>unjudged))(?=  |$)",
    r"^(?P<good>(?:the loop|all \d+ loops) holds?)|^(?P<bad>\d+ of \d+ loops? violated)",
    r"^ *(?P<bad>(?:gradient|step-count|none-pattern|non-finite|parameters|not-accumulable|raised)(?:: [\w-]+)?)"
    r"(?= at step \d|$)",
    r"^ *(?P<warn>finding\b[^:]*|accepted|unjudged):",
    r"^ *(?P<label>loss|backward|step|gradient|window|parameter|error|stored|script|replay|page) {2,}",
    r"  (?P<label>[#-]* *\|[#-]*)$",
)
_COPIED = re.compile(r" *(@example\(|(stored|script|replay|page) {2,})")
"""Lines that a reader copies; a break within would break them."""
_HANGING = re.compile(r" *(?:[\w-]+ {2,})?")


def say(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines: on a terminal coloured, and wrapped at words under the text that they continue; else as they are.

    `NO_COLOR` and `FORCE_COLOR` overrule, as rich reads them.
    """
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Words(RegexHighlighter):
        highlights = [*_COLOURED]  # noqa: RUF012 - as rich declares it

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the program with status 1, as if the code under test had

    file = sys.stdout if file is None else file
    # in a kernel rich would display HTML in place of writing to the file
    console = Terminal(
        file=file, force_jupyter=False, highlighter=Words(), theme=Theme(STYLES), markup=False, emoji=False,
        soft_wrap=True,
    )  # fmt: skip
    # what a program puts in place of its standard error often has no `isatty`
    width = console.width if getattr(file, "isatty", bool)() else None
    for line in lines:
        console.print(line if width is None or _COPIED.match(line) else _wrapped(line, width))
    file.flush()


def _wrapped(line: str, width: int) -> str:
    hanging = _HANGING.match(line)
    indent = " " * min(hanging.end() if hanging else 0, width // 3)
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    wrap.drop_whitespace = len(line) > width
    return wrap.fill(line) if len(line) > width else line


# The table of expected and observed weights on a console, with bars.


HEADER = "weight of each item, by micro-batch (index, {rank}count, expected, observed; # observed, | expected):"
WIDTH = 24
"""Characters of the longest bar."""
Row = tuple[str | int, int | None, float, float, float]
"""Index of the micro-batch, its rank where there are several, count, expected and observed weight of each item."""


def weight_lines(rows: Iterable[Row], most: int | None = None) -> list[str]:
    """Return the lines of a table of weights; none where there are none.

    Args:
        rows: of the micro-batches of a window.
        most: rows that are shown at most.
    """
    rows = list(rows)
    if not rows:
        return []
    top = max((abs(w) for *_, e, o in rows for w in (e, o) if math.isfinite(w)), default=0.0)
    shown = rows[:most]
    ranks = any(rank is not None for _, rank, *_ in rows)
    places = [f"{j:>3} {rank:>4}" if ranks else f"{j:>3}" for j, rank, *_ in shown]
    lines = [
        f"  {place} {n:>8.6g} {e:>12.6g} {o:>12.6g}  {_bar(e, o, top)}".rstrip()
        for place, (*_, n, e, o) in zip(places, shown, strict=True)
    ]
    more = [f"  and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    return [HEADER.format(rank="rank, " if ranks else ""), *lines, *more]


def _bar(expected: float, observed: float, top: float) -> str:
    """Return a bar as long as the observed weight, of `-` where it is negative, with a mark at the expected one."""
    if not top or not math.isfinite(expected) or not math.isfinite(observed):
        return ""
    bar = ("#" if observed > 0 else "-") * _length(observed, top)
    mark = _length(expected, top)
    return f"{bar[:mark]:<{mark}}|{bar[mark:]}"


def _length(weight: float, top: float) -> int:
    # rounding must not decide between two lengths
    return math.floor(round(WIDTH * abs(weight) / top, 6) + 0.5)


# The words of results, which `print(result)` and the commands print.


SHOWN_ROWS = 8


def violation_title(kind: str, diagnosis: str) -> str:
    """Return `kind: diagnosis`, or the kind alone where the diagnosis says no more."""
    return kind if kind == diagnosis else f"{kind}: {diagnosis}"


def _live_title(violation: LiveViolation) -> str:
    at = "" if violation.step is None else f" at step {violation.step}"
    more = violation.occurrences - 1
    return f"{violation_title(violation.kind, violation.diagnosis)}{at}" + (f" and {more} more" if more else "")


def _places(violation: LiveViolation | Violation) -> list[str]:
    pairs = [*getattr(violation, "places", {}).items(), ("parameter", violation.parameter)]
    error = getattr(violation, "gradient_error", None)
    pairs.append(("gradient", None if error is None else f"off by {percent(error)}"))
    return aligned((name, value) for name, value in pairs if value)


def violation_lines(violation: LiveViolation) -> list[str]:
    """Return a violation of a live run in words: kind, diagnosis, explanation, places, weights."""
    table = weight_lines(_rows(violation), most=SHOWN_ROWS)
    return [_live_title(violation), violation.explanation, *_places(violation), *table]


def _rows(violation: LiveViolation | Violation) -> list[Row]:
    return [(w.place, w.rank, w.count, w.expected, w.observed) for w in violation.weights]


def live_lines(result: LiveResult, *, shown: bool = False) -> list[str]:
    """Return the result of a run in words.

    Args:
        result: the result.
        shown: whether violations were printed when they were found, and why nothing was judged is said elsewhere.
    """
    verdict = "VIOLATED" if result.violations else result.verdict
    if result.interrupted and result.holds:
        verdict = "holds so far (interrupted)"
    steps = counted(result.windows, "step")
    over = f" over {result.ranks} ranks" if result.ranks > 1 else ""
    accepted = f", {counted(len(result.accepted), 'fault')} accepted" if result.accepted else ""
    lines = [f"{result.script}  {verdict}  {steps} judged of {result.steps}{over}{accepted}  {result.seconds:.1f} s"]
    for how, count in result.again.items():
        lines.append(f"    {counted(count, 'window')} computed again, {how}")
    for violation in result.violations:
        lines += [f"    {line}" for line in ([_live_title(violation)] if shown else violation_lines(violation))]
    for violation in result.accepted:
        lines += [f"    accepted: {_live_title(violation).partition(': ')[2]}, {violation.explanation}"]
    lines += [f"    {result.second_opinion}"] if result.second_opinion else []
    lines += [f"    finding: {finding}" for finding in (*result.findings, *result.disagreements)]
    return lines if shown or result.unjudged is None else [*lines, f"    unjudged: {result.unjudged}"]


def loop_line(result: Result, width: int = 0) -> str:
    """Return the verdict on a loop in one line, with its name in a column of so many characters."""
    verdict = "holds" if result.holds else "VIOLATED"
    if result.interrupted and result.holds:
        verdict = "holds so far (interrupted)"
    worst = f"worst error {of_bound(result.ratio)}" if result.holds and result.cases else ""
    if result.unjudged is not None:
        verdict, worst = "unjudged", ""
    cases = counted(result.cases, "case")
    return f"{result.loop:<{width}}  {verdict:<8}  {cases:>9}  {result.seconds:6.1f} s  {worst}".rstrip()


def loop_lines(result: Result, width: int = 0) -> list[str]:
    """Return the line of a loop, and below it its assumptions, findings and violation."""
    lines = []
    if drawn := [name for name in result.assumes if name not in DECLARED]:
        lines.append(f"assumes {', '.join(drawn)}: nothing else was tried")
    lines += [f"assumes {name}: {meaning}" for name, meaning in DECLARED.items() if name in result.assumes]
    if result.autocast:
        lines.append(f"losses may be computed under torch.autocast in {result.autocast}")
    if result.traffic:
        lines.append(result.traffic)
    if result.moved_by_zeros:
        moving = counted(result.moving_cases, "case")
        lines.append(f"in {moving} zeros moved a parameter that None leaves: {result.moved_by_zeros}")
    lines += (result.second_opinion or "").splitlines()
    lines += [f"finding, for which no loop is to blame: {finding}" for finding in result.findings]
    lines += [
        f"{counted(count, 'case')} could not be judged here: {' '.join(reason.split())}"
        for reason, count in result.skipped.items()
    ]
    lines += [
        f"{count} of {result.windows + sum(result.windows_skipped.values())} steps could not be judged: {reason}"
        for reason, count in result.windows_skipped.items()
    ]
    if result.violation is not None:
        lines += [*result.violation.words, _found(result)]
    return [loop_line(result, width), *(f"    {line}".rstrip() for line in lines)]


def _found(result: Result) -> str:
    assert result.violation is not None
    first, spec = "the weight probe", result.violation.case.spec
    if spec is None:
        first = "the case that is tried first, two whole windows"
    elif result.found_after is None and spec.layer_kinds != ["readout"]:
        first = "a linear model"
    runs = f"; the loop was run {counted(result.runs, 'time')}"
    if result.found_after == 0:
        return f"found on {first}, then shown on this small case{runs}"
    if not result.cases:
        return f"found on {first}, before any case was drawn{runs}"
    if result.found_after is None:
        return f"found on {first}; none of {counted(result.cases, 'case')} drawn shows it{runs}"
    if result.shrinking:
        return f"found after {counted(result.found_after, 'case')}; {result.shrinking}{runs}"
    return f"found after {counted(result.found_after, 'case')}, then shrunk to this one{runs}"


# The same as HTML, for a notebook, which runs no script and has no style sheet of ours.


_GROUND = {"good": "#0a6b2d", "bad": "#a4161a", "warn": "#7a4d00"}
_CELL = "padding:0 .8em;text-align:right"


def result_html(lines: Sequence[str], verdict: str, violations: Iterable[LiveViolation | Violation]) -> str:
    """Return a verdict as HTML: its first line, then each violation with the weights as bars, then all words, folded.

    Args:
        lines: the verdict in words.
        verdict: `holds`, `violated` or `unjudged`.
        violations: in order.
    """
    tone = {"holds": "good", "violated": "bad"}.get(verdict, "warn")
    chip = f'<b style="background:{_GROUND[tone]};color:#fff;padding:.1em .5em;border-radius:.3em">{verdict}</b>'
    parts = [f"<p>{chip} <code>{html.escape(lines[0])}</code></p>"]
    for violation in violations:
        title = violation_title(violation.kind, violation.diagnosis)
        parts.append(f"<p><b>{html.escape(title)}</b>. {html.escape(violation.explanation)}</p>")
        parts.append(f"<pre>{html.escape(chr(10).join(_places(violation)))}</pre>")
        parts.append(_weights_html(_rows(violation)))
    words = html.escape("\n".join(lines))
    return f"<div>{''.join(parts)}<details><summary>in words</summary><pre>{words}</pre></details></div>"


def _weights_html(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    top = max((abs(w) for *_, e, o in rows for w in (e, o) if math.isfinite(w)), default=0.0) or 1.0
    ranks = any(rank is not None for _, rank, *_ in rows)
    names = ("micro-batch", *(("rank",) if ranks else ()), "count", "expected", "observed", "observed, | expected")
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    body = []
    for place, rank, count, expected, observed in rows:
        cells = (str(place), *((str(rank),) if ranks else ()), f"{count:.6g}", f"{expected:.6g}", f"{observed:.6g}")
        bar = "".join(
            f'<div style="position:absolute;{style}"></div>'
            for weight, style in (
                (observed, "left:0;top:.2em;height:.8em;width:{}%;background:#a8487f"),
                (expected, "left:{}%;top:0;height:1.2em;border-left:2px solid currentColor"),
            )
            if math.isfinite(weight)
            for style in (style.format(round(100 * abs(weight) / top)),)
        )
        drawn = f'<td><div style="position:relative;width:16em;height:1.2em">{bar}</div></td>'
        body.append("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + drawn + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"
