"""The ledger of communication: the collectives and bytes of each window, as predicted and as counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcheck_suite.records.store import Record
from gradcheck_suite.report.content import Matrix, Section, Table
from gradcheck_suite.report.provenance import sources
from gradcheck_suite.report.records_view import latest

KEY, TITLE, TAB = "traffic", "What several ranks send to each other", "cost"
COLUMNS = ("wrapper", "reset mode", "ranks", "K", "collectives", "bytes", "of which", "collectives predicted",
           "bytes predicted", "as predicted")  # fmt: skip


def traffic(records: Sequence[Record]) -> Section | None:
    """Return the section on communication; None where nothing was counted."""
    if not records:
        return None
    newest = latest(records, lambda d: (d["loop"], d["ranks"], d["accumulation_steps"]))
    datas = [record.data for record in newest]
    agree = sum(as_predicted(data) for data in datas)
    text = (
        "Ranks are the processes that train together. A collective is one exchange between all of them, such as an "
        "all-reduce, which adds up gradients. A window has K micro-batches on each rank. A loop that communicates once "
        "per window takes as many collectives for K = 4 as for K = 1; under fully_shard (fsdp2) every micro-batch also "
        "gathers the parameters.",
        f"Counted on rank 0, on a model of five float64 parameters; {agree} of {len(datas)} windows take exactly the "
        "collectives and bytes that the wrapper's algorithm predicts.",
    )
    table = Table(
        "Collectives and bytes of each window, for each wrapper and reset mode",
        COLUMNS,
        tuple(_row(data) for data in datas),
        "Bytes are those that rank 0 gives to its collectives.",
    )
    return Section(KEY, TITLE, TAB, text, (_matrix(datas),), tables=(table,), sources=sources(newest))


def total(kinds: Mapping[str, Any]) -> tuple[float, float]:
    """Return the number of collectives of all kinds, and their bytes."""
    return sum(float(number) for number, _ in kinds.values()), sum(float(size) for _, size in kinds.values())


def as_predicted(data: Mapping[str, Any]) -> bool:
    """Return whether a window takes exactly the collectives and bytes that its wrapper's law predicts."""
    counted, law = ({kind: tuple(both) for kind, both in data[which].items()} for which in ("observed", "predicted"))
    return bool(counted == law)


def _matrix(datas: Sequence[Mapping[str, Any]]) -> Matrix:
    """Return the collectives and bytes by wrapper and K; all reset modes of a wrapper are in one cell."""
    cells: dict[str, dict[tuple[int, int], list[Mapping[str, Any]]]] = {}
    for data in datas:
        wrapper, place = _parts(data)[0], (int(data["ranks"]), int(data["accumulation_steps"]))
        cells.setdefault(wrapper, {}).setdefault(place, []).append(data)
    places = sorted({place for row in cells.values() for place in row})
    return Matrix(
        "Collectives and bytes of a window, on every reset mode of the wrapper; green: exactly as predicted",
        "wrapper",
        tuple(f"{ranks} ranks, K = {k}" for ranks, k in places),
        tuple((name, tuple(_cell(row.get(place, ())) for place in places)) for name, row in cells.items()),
    )


def _cell(datas: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    said = dict.fromkeys("{:g} collectives, {:g} bytes".format(*total(data["observed"])) for data in datas)
    if not said:
        return "none", ("not counted",)
    return "good" if all(map(as_predicted, datas)) else "bad", tuple(said)


def _parts(data: Mapping[str, Any]) -> tuple[str, str]:
    wrapper, _, mode = str(data["loop"]).partition("/")
    return wrapper, mode


def _row(data: Mapping[str, Any]) -> tuple[str | int | float, ...]:
    of = ", ".join(f"{number:g} {kind} ({size:g} bytes)" for kind, (number, size) in data["observed"].items())
    return (
        *_parts(data),
        int(data["ranks"]),
        int(data["accumulation_steps"]),
        *total(data["observed"]),
        of,
        *total(data["predicted"]),
        "yes" if as_predicted(data) else "no",
    )
