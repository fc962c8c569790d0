"""Evidence about the suite itself: known bugs, claims, calibration, atlas, zero or None.

Must not import the report or the command line.
"""
