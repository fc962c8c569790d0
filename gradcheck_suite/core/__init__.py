"""Plain data and arithmetic: cases, the loop contract, results, bounds, records.

Must import neither torch nor JAX.
"""
