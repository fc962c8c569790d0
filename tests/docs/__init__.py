"""Tests of the documentation: what it shows is what happens."""
