"""Further runs of a loop, and what each of them shows: its losses, whether it repeats.

Must not name a fault.
"""
