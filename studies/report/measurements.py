"""Which records of measurements a figure shows: those of one machine, and of each device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradcheck_suite.core.records import Data, Record


def current(records: Iterable[Record], measures: Sequence[str] = ()) -> list[Record]:
    """Return the measurements of each device that were made where its newest one was made.

    Times and bytes compare only within one machine and one set of versions, so older rows of
    another are left out.

    Args:
        records: oldest first.
        measures: what they measure; all of them without one.
    """
    records = [
        record for record in records if not measures or record.data.get("measures") in measures
    ]
    newest = {record.data.get("device"): record for record in records}
    return [
        record for record in records if _made_where_made(record, newest[record.data.get("device")])
    ]


def _made_where_made(record: Record, other: Record) -> bool:
    """Return whether two records come from one machine and one set of versions.

    A record may not say its device.
    """
    mine = record.environment
    others = other.environment
    device = mine.get("device"), others.get("device")
    alike = all(
        mine.get(name) == others.get(name) for name in ("processor", "processor_count", "versions")
    )
    return alike and (device[0] == device[1] or None in device)


def by_device(rows: Iterable[Data]) -> dict[str, list[Data]]:
    """Return the rows of each device, in the order of the devices' names."""
    found: dict[str, list[Data]] = {}
    for row in rows:
        found.setdefault(str(row["device"]), []).append(row)
    return dict(sorted(found.items()))
