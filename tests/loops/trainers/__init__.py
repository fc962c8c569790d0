"""Trainers as subjects. Those that are not installed are skipped."""
