"""What a gradient of zeros does to a parameter and its optimizer state that None does not: predicted, and run.

`laws` has one record for each optimizer, `recurrences` and `sums` derive its steps in two ways, `runs` trains with
torch, `rows` makes the table of the report. Must not import the report or the command line.
"""

from __future__ import annotations

from gradcheck_suite.evidence.zero_or_none.laws import LAWS, Law
from gradcheck_suite.evidence.zero_or_none.rows import Row, rows

__all__ = ["LAWS", "Law", "Row", "rows"]
