"""Tests of the bridge from torch.export to JAX."""
