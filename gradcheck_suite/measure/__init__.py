"""What a reset mode costs: operations and bytes, time, memory.

Judges no gradient: does not import verification.
"""
