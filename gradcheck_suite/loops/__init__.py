"""The built-in loops: the reset modes, one record each, and further sound loops.

Each built-in loop is an ordinary training loop under the loop contract, sound for `mean` and `sum`. This package does
not import what runs, judges or measures loops.
"""

from __future__ import annotations

from gradcheck_suite.loops.modes import MODES, RESET_MODES, ResetMode
from gradcheck_suite.loops.precision import PRECISION
from gradcheck_suite.loops.sound import SOUND
from gradcheck_suite.schema.contract import Loop

__all__ = ["BUILT_IN", "MODES", "RESET_MODES", "ResetMode"]

BUILT_IN: dict[str, Loop] = {**MODES, **SOUND, **PRECISION}
"""Built-in loops by name: the reset modes, which `verify` runs when given no loop, and further sound loops."""
