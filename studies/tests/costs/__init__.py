"""The ledger, by hand and against torch's own instruments, and the measurements that the benchmarks
use.
"""
