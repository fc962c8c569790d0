"""What the elements of a wrong gradient show: weights fitted to it, a scale, lost elements, shared memory.

Must not run a loop.
"""
