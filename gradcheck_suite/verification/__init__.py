"""Judges loops: checks one case, searches and shrinks, checks that a Problem is a sum over items,
compares with JAX.

Must not import the command line. Not called `verify`: the package would hide the public function.
"""
