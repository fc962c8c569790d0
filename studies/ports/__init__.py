"""Ports with planted faults, as data: torch modules and JAX functions, and in `pairs.txt` the truth
about each pair.
"""
