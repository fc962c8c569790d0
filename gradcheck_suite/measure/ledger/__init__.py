"""What a training loop does with memory, counted exactly: operations, bytes moved, bytes alive, phase by phase.

No clock and no GPU: sizes are the same on every device. What the ledger counts, and what it cannot see, is said in
`gradcheck_suite.measure.ledger.mode`.
"""

from __future__ import annotations

from gradcheck_suite.measure.ledger.memory import CATEGORIES, Peak
from gradcheck_suite.measure.ledger.mode import PHASES, Ledger
from gradcheck_suite.measure.ledger.prediction import Cost, cost_table
from gradcheck_suite.measure.ledger.recording import record
from gradcheck_suite.measure.ledger.traffic import Traffic

__all__ = ["CATEGORIES", "PHASES", "Cost", "Ledger", "Peak", "Traffic", "cost_table", "record"]
