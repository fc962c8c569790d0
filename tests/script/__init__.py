"""Tests of the scripts that counterexamples travel in."""
