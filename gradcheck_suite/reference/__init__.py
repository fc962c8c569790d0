"""The large-batch references of a window, one in torch and one in JAX, and their rounding errors.

The two references are independent of each other. Must not import `judge` or `verification`.
"""
