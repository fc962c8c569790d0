"""Widely read claims about resetting gradients, each with a check that returns a verdict.

Must not import the report or the command line.
"""

from __future__ import annotations

from gradcheck_suite.evidence.claims import source1, source2, source3
from gradcheck_suite.evidence.claims.record import SOURCES, Claim, Finding

__all__ = ["CLAIMS", "SOURCES", "Claim", "Finding"]

CLAIMS: dict[str, Claim] = {claim.number: claim for claim in (*source1.CLAIMS, *source2.CLAIMS, *source3.CLAIMS)}
"""The claims by number."""
