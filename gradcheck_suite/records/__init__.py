"""Stored records of results, counterexamples on disk, and descriptions of cases and violations in text.

Must not import anything that runs a case.
"""
