"""Planted faults, and the test that each is found."""
