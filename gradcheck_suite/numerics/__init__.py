"""Rounding bounds, the comparison of gradients, least squares, and the tolerance rules of other tools.

Must import neither torch nor JAX nor plain data of the suite: numpy only.
"""
