"""What the suite itself is judged by: known bugs, claims, calibration.

Does not import the report or the command line.
"""
