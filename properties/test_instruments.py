"""No instrument of an audit fails on a drawn program, whatever modes, transformations and layers it
has.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from properties.helpers import scaled
from tests.auditing.running import trained
from tests.auditing.surroundings import BESIDE, LAYERS, MODES, PARTS, Script
from tests.auditing.test_instruments import assert_judged


def some(table: dict[str, object], *, most: int) -> st.SearchStrategy[list[str]]:
    """Return a strategy for a few names of a table, in any order."""
    return st.lists(st.sampled_from([*table]), max_size=most, unique=True)


SCRIPTS = st.builds(
    Script,
    layer=st.sampled_from([*LAYERS]),
    beside=some(BESIDE, most=2),
    modes=some(MODES, most=3),
    part=st.sampled_from(PARTS),
    faulty=st.booleans(),
    called_first=st.booleans(),
)


@pytest.mark.share(4)
@scaled(3)
@given(script=SCRIPTS)
def test_no_instrument_fails_and_no_mode_sees_the_audit(script):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script.text())
        try:
            trained(path)
        except Exception as error:  # torch does not allow everything everywhere
            event(f"torch refuses it: {type(error).__name__}")
            assume(False)
        assert_judged(script, Path(folder))
