"""Rounding bounds, the comparison of gradients, least squares, and the tolerance rules of other tools.

Must import neither torch nor JAX nor other packages of the suite: numpy and scipy only.
"""
