"""Judges loops: checks one case, searches and shrinks, checks that a Problem is a sum over items, compares with JAX.

Must not import trainers, evidence, report or the command line.
"""
