"""What resetting gradients costs: the models, modes, clocks and floors that the benchmarks measure with.

`properties/benchmarks/bench_modes.py` times, `bench_memory_modes.py` beside it weighs; both write records that the
report reads.
"""
