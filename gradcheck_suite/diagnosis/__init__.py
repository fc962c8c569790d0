"""From an expected and an observed gradient to the name of the fault.

Decides on names only; whether there is a fault is decided in `verification`.
"""
