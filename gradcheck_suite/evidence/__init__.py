"""Evidence about the suite itself: known bugs, claims and calibration.

Must not import the report or the command line.
"""
