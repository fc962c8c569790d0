"""Real trainers, one file for each: its loops and their records, `TRAINERS`.

`gradcheck_suite.loops.trainers` reads the records where the trainer's package is not installed, so
a file here imports neither torch nor the package at its top, but inside its functions.
"""
