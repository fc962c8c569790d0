"""The built-in loops: the reset modes, one record each, further sound loops, loops for several
ranks, real trainers.

Does not import what runs, judges or measures loops.
"""
