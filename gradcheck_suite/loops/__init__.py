"""The built-in loops: every way torch offers to reset gradients, in every place it may stand.

Each is an ordinary training loop under the loop contract, sound for `mean` (the window is counted first) and `sum`.
"""

from __future__ import annotations

from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.loops.precision import PRECISION
from gradcheck_suite.loops.sound import SOUND
from gradcheck_suite.schema.contract import Loop

BUILT_IN: dict[str, Loop] = {**MODES, **SOUND, **PRECISION}
"""Built-in loops by name: the reset modes, which `verify` runs when given no loop, and further sound loops."""
