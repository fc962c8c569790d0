"""A live run: somebody's training script is judged as it is, at each of its optimizer steps.

Must not change the run: no random number, no gradient, no output, no collective of its own. Must
not draw cases. Not called `audit`: the package would hide the public function.
"""
