"""Further runs of a loop, and what each of them shows: its losses, whether it repeats.

May name what such a run alone shows (a loss that is not finite, a loop that does not repeat), and no wrong weights.
"""
