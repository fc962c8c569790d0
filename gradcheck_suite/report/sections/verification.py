"""What was verified: the verdict on each loop, and the layers, losses and splits of its cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.records.columns import counted
from gradcheck_suite.records.description import violation_title
from gradcheck_suite.records.store import Record
from gradcheck_suite.report.charts.evidence import counts_plot
from gradcheck_suite.report.content import Cell, Figure, Matrix, Section, Table, device_name
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest
from gradcheck_suite.schema.case import DTYPES

KEY, TITLE, TAB = "verified", "What was verified", "verification"
MOST_BARS = 14
NOT_RUN = (
    "Not run: no record has this loop with this dtype on this device. `gradcheck-suite verify LOOP --dtype DTYPE` "
    "makes one, with `--device cuda` on a machine with a GPU, or with `--ranks N` for a loop of several ranks.",
)


def newest_verdicts(records: Sequence[Record]) -> list[Record]:
    """Return the last record of each loop in each dtype, on each device, with each optimizer and problem."""
    return latest(
        records, lambda d: (d.get("loop"), d.get("dtype"), d.get("device"), d.get("optimizer"), d.get("problem"))
    )


def verification(records: Sequence[Record]) -> Section:
    """Return the section on verified loops."""
    newest = newest_verdicts(records)
    if not newest:
        return Section(KEY, TITLE, TAB, missing="Nothing has been verified yet: run `gradcheck-suite verify`.")
    datas = [record.data for record in newest]
    verdicts = Table(
        "Every loop and its verdict",
        (
            "loop",
            "verdict",
            "cases judged",
            "dtype",
            "device",
            "optimizer",
            "worst error / allowed",
            "diagnosis",
            "cases not judged, and why",
        ),
        tuple(_verdict_row(data) for data in datas),
        "The ratio is the largest difference from the float64 reference over what rounding allows, among cases "
        "that hold. A loop that is no built-in is a user's.",
    )
    tables, figures = [verdicts], []
    disagreements = [(str(d.get("loop", "?")), str(d.get("dtype", "")), each) for d in datas for each in found_by(d)]
    if disagreements:
        tables.append(Table("Where torch and JAX disagree, and no loop is to blame", ("loop", "dtype", "finding"),
                            tuple(disagreements)))  # fmt: skip
    reached, of = _reached(datas), _judged_text(datas)
    for category, title in (("splits", "Splits that the cases reached"), ("layers", "Layers"), ("losses", "Losses")):
        if counts := dict(reached.get(category, Counter()).most_common()):
            caption = f"{title} (cases, {of})"
            tables.append(Table(caption, ("what", "cases"), tuple(counts.items())))
            figures.append(_coverage(category, title, counts, of))
    text = (
        "Each loop trained random models on random splits. Every gradient that reached its optimizer was compared "
        "with the gradient of the whole window in one batch, computed in float64 by torch and by JAX.",
        *([f"{disagreement(datas)}, which is no loop's fault. A table below says where."] if disagreements else []),
    )
    return Section(
        KEY, TITLE, TAB, text, (matrix(newest),), tuple(figures), tables=tuple(tables), sources=sources(newest)
    )


def matrix(records: Sequence[Record], most: int | None = None) -> Matrix:
    """Return the verdicts as a matrix: loop x dtype and device, violated loops first, then the built-in modes.

    Args:
        records: the last of each setting.
        most: rows at most; the built-in modes are first then, and the caption says what is left out.
    """
    cells: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for record in records:
        data = record.data
        place = (str(data.get("dtype", "?")), str(data.get("device", "?")))
        # one setting with several optimizers or problems: its worst
        known = cells.setdefault(str(data.get("loop", "?")), {}).get(place)
        if known is None or (data["verdict"] != "holds", _ratio(data)) > (known["verdict"] != "holds", _ratio(known)):
            cells[str(data.get("loop", "?"))][place] = data
    places = sorted({place for row in cells.values() for place in row}, key=place_order)
    names = [_place_name(*place) for place in places]
    if "cuda" not in {device for _, device in places}:
        places.append(("", "cuda"))
        names.append(_place_name("any", "cuda"))
    holding = {loop: all(d["verdict"] == "holds" for d in row.values()) for loop, row in cells.items()}
    order = sorted(cells, key=lambda loop: (most is not None and loop not in MODES, holding[loop], loop not in MODES))
    counts = [
        {
            _judged(row[place])
            for loop in order[:most]
            if place in (row := cells[loop]) and row[place]["verdict"] == "holds"
        }
        for place in places
    ]
    counted = any(len(mine) > 1 for mine in counts)
    if not counted:
        names = [f"{name}{''.join(map(_cases, mine))}" for name, mine in zip(names, counts, strict=True)]
    rows = tuple((loop, tuple(_cell(cells[loop].get(place), counted) for place in places)) for loop in order[:most])
    left = order[len(rows) :]
    bad = sum(not holding[loop] for loop in left)
    more = f"; {len(left)} more loops{f', {bad} violated' if bad else ''}" if left else ""
    caption = f"{'Cases, worst' if counted else 'Columns: dtype, device (cases). Cells: worst'} error / allowed{more}"
    empty = most is None and any(kind == "none" for _, cells in rows for kind, _ in cells)
    return Matrix(caption, "loop" if most is None else "mode", tuple(names), rows, NOT_RUN if empty else ())


def found_by(data: Mapping[str, Any]) -> list[str]:
    """Return where torch and JAX disagree, as a record has it."""
    return [str(each) for each in data.get("findings") or ()]


def disagreement(datas: Sequence[Mapping[str, Any]]) -> str:
    """Return in how many gradients torch and JAX disagree, as a clause; empty if they agree."""
    count = len({each for data in datas for each in found_by(data)})
    return f"In {counted(count, 'gradient')} torch and JAX disagree" if count else ""


def share_text(ratio: float) -> str:
    """Return a share with two digits, or with as many as show that it is below 1."""
    texts = (f"{ratio:.{digits}g}" for digits in (2, 3, 4))
    return next((text for text in texts if ratio >= 1 or text != "1"), "almost 1")


def _cases(number: int) -> str:
    return f"\N{NO-BREAK SPACE}({number:,})"


def place_order(place: tuple[str, str]) -> tuple[bool, int, tuple[str, str]]:
    """Return what dtypes and devices are sorted by: the CPU first, then the dtypes as the suite lists them."""
    dtype, device = place
    return device != "cpu", DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), place


def _place_name(dtype: str, device: str) -> str:
    """Return a dtype and a device as the header of a column."""
    return f"{dtype} {device_name(device)}"


def _cell(data: Mapping[str, Any] | None, counted: bool) -> tuple[str, tuple[str, ...]]:
    if data is None:
        return "none", ("not run",)  # NOT_RUN says why
    if data["verdict"] != "holds":
        violation = data.get("violation") or {}
        return "bad", ("violated", str(violation.get("diagnosis", "")))
    said = (f"{_judged(data):,}", share_text(_ratio(data))) if counted else (share_text(_ratio(data)),)
    return "good", (f"\N{CHECK MARK} {said[0]}", *said[1:])


def _ratio(data: Mapping[str, Any]) -> float:
    ratio = data.get("worst_error_over_allowed")
    return float(ratio) if ratio is not None else 0.0


def _judged(data: Mapping[str, Any]) -> int:
    return int(data.get("judged", data.get("cases", 0)))


def _judged_text(datas: Sequence[Mapping[str, Any]]) -> str:
    """Return of how many cases counts are; each row judges cases of its own, which may reach a layer each."""
    judged = [_judged(data) for data in datas]
    what = "loops" if len({data.get("loop") for data in datas}) == len(datas) else "verdicts"
    rows = (
        f"{judged[0]:,} cases for each of {len(judged)} {what}"
        if len(set(judged)) == 1
        else f"the sum over {len(judged)} {what}"
    )
    return f"of {sum(judged):,} judged: {rows}"


def _coverage(category: str, title: str, counts: Mapping[str, int], of: str) -> Figure:
    shown = dict(list(counts.items())[:MOST_BARS])
    rest = f"; {len(counts) - MOST_BARS} more in the table" if len(counts) > MOST_BARS else ""
    return Figure(
        f"coverage-{category}",
        counts_plot(shown, "cases"),
        f"{title}: number of cases with each, {of}; " + ", ".join(f"{k} {v:,}" for k, v in shown.items()),
        f"{title}: cases with each, {of}{rest}.",
    )


def _verdict_row(data: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        str(data.get("loop", "?")),
        str(data.get("verdict", "?")),
        _judged(data),
        str(data.get("dtype", "")),
        str(data.get("device", "")),
        data.get("optimizer"),
        data.get("worst_error_over_allowed"),
        title_of(data.get("violation")),
        "; ".join(f"{count}: {why}" for why, count in (data.get("skipped") or {}).items()) or None,
    )


def title_of(violation: Mapping[str, Any] | None) -> str | None:
    """Return the kind and diagnosis of a violation in a record."""
    return violation_title(str(violation["kind"]), str(violation["diagnosis"])) if violation else None


def _reached(datas: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for data in datas:
        for category, counts in (data.get("reached") or {}).items():
            found.setdefault(str(category), Counter()).update({str(k): int(v) for k, v in counts.items()})
    return found
