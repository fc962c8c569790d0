"""Calibration: counts of false alarms and of detected planted errors, for the suite's bounds and for other rules.

Must not define a bound: it counts what the bounds of `numerics` do.
"""
