"""A live run of JAX: a script is judged as it is, at each of its optimizer steps.

Gradients and updates carry marks in the traced program (`marks`), which lower to nothing. Beside
each compiled call that has some, a second program computes a summary of their values (`replay`).
From these the window of each step is put together (`windows`), and the judge of the audit names
what is wrong (`judge`).

Must not change the run: no number, no output, no donated buffer, no exception of its own. Must not
be imported before the program has imported JAX.
"""
