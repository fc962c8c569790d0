"""Stand-alone scripts: a violation as one Python file that needs torch alone, to send to whoever mends the loop.

A script's functions are the suite's own, copied by their source from `execution`, `numerics` and `verification`: what a
script checks is what the suite checks. Loops are not run in this process: the numbers
come from the violation's evidence.
"""

from __future__ import annotations

from gradcheck_suite.script.processes import unrepeatable
from gradcheck_suite.script.writer import script_text

__all__ = ["script_text", "unrepeatable"]
