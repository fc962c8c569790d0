"""Hypothesis strategies for cases, and counts of what the drawn cases cover.

Draws specs only. Must not build a model, run a loop, or import `reference`.
"""
