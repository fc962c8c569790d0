"""Hypothesis strategies for cases, and counts of what the drawn cases covered.

Draws specs only; builds no model and runs no loop.
"""
