"""The catalogue: inputs, layers and losses of generated problems, each in torch and in JAX.

Must not run or judge a loop.
"""
