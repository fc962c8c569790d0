"""Widely read claims about resetting gradients, each with a check that returns a verdict.

Must not import the report or the command line.
"""

from __future__ import annotations

from gradcheck_suite.evidence.claims import when_to_zero_grad, zero_and_gradient_tracking, zeroing_blog_post
from gradcheck_suite.evidence.claims.claim import SOURCES, Claim, Finding

__all__ = ["CLAIMS", "SOURCES", "Claim", "Finding"]

CLAIMS: dict[str, Claim] = {
    claim.number: claim
    for claim in (*zeroing_blog_post.CLAIMS, *zero_and_gradient_tracking.CLAIMS, *when_to_zero_grad.CLAIMS)
}
"""The claims by number."""
