"""Further runs of a loop, and what each of them shows: its losses, whether it repeats.

Names only the faults that such a run shows: losses that are not finite and are skipped, a loop that does not repeat,
and losses that are computed in the wrong mode, at other parameters, from other batches or from parts of a micro-batch.
Must not import `on_probe`.
"""
