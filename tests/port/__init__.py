"""Tests of the room `port`."""
