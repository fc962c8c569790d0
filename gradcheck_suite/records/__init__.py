"""Records of results on disk, counterexamples, and a case or a violation in words.

Does not import anything that runs a case.
"""
