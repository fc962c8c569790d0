"""What is run and what came of it, as plain data: specs, plans, cases, problems, results.

Imports neither torch nor JAX, and nothing of the package but `errors`.
"""
