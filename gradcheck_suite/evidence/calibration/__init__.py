"""Calibration: how often a sound loop is blamed, and how small a planted error is found, by the bounds and by others.

Nothing here decides what the bounds are. It counts what they do, so that anybody can count again.
"""
