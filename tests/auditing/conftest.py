"""The scripts that audits run, as files."""

from __future__ import annotations

import pytest

from tests.auditing.scripts import write


@pytest.fixture(scope="session")
def scripts(tmp_path_factory):
    """The folder of the scripts, with those of two ranks in `ranks` and those of trainers in
    `trainers`.
    """
    return write(tmp_path_factory.mktemp("scripts"))
