"""From expected and observed gradients to the name of the fault.

Must not decide whether there is a fault: `verification` does. Must not import `verification`.
"""
