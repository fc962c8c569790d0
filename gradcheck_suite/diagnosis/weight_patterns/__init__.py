"""The patterns of weights that known faults give, and the name of the pattern that fits.

Must not run a loop.
"""
