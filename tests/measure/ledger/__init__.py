"""The ledger: by hand, against torch's own instruments, and what it leaves behind."""
