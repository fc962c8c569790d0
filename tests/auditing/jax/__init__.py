"""Audits of runs of JAX."""
