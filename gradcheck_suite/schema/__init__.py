"""Plain data: specs, plans, cases, problems, the loop contract, verdicts and results, with their JSON.

Must import neither torch nor JAX, and of this package only `errors`; types aside.
"""
