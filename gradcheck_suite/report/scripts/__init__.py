"""Counterexamples that travel: a violation as one Python file that needs torch alone, to send to a mender."""

from __future__ import annotations

from gradcheck_suite.report.scripts.assembly import script_text

__all__ = ["script_text"]
