"""What a reset mode costs: operations and bytes (the ledger), time, and memory.

This package judges no gradient and does not import `verification`.
"""
