"""Check one case; search for the smallest violation; is the Problem a sum over items; JAX's second opinion.

Does not import trainers, evidence, report or the command line.
"""
