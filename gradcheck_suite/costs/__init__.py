"""What resetting gradients costs: the models, modes, clocks and floors that the benchmarks measure with.

`properties/bench_modes.py` times, `properties/bench_modes_memory.py` weighs; both write records that the report reads.
"""
