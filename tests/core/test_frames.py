"""Whose a source file is."""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig

import pytest

from gradcheck_suite.core import comparison, frames
from gradcheck_suite.core.frames import Owner, is_outside_torch, is_users, owner_of

PACKAGES = sysconfig.get_path("purelib")
TORCH = frames._TORCH


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("/home/me/train.py", Owner.USER),
        ("train.py", Owner.USER),
        # a project that is named as a framework is
        ("/home/me/torch/train.py", Owner.USER),
        ("/home/me/site-packages.py", Owner.USER),
        (f"{TORCH}nn{os.sep}functional.py", Owner.TORCH),
        (f"{PACKAGES}/accelerate/accelerator.py", Owner.LIBRARY),
        # a package whose name begins as a framework's does
        (f"{PACKAGES}/torchvision/models/resnet.py", Owner.LIBRARY),
        (f"{PACKAGES}/optax/_src/update.py", Owner.FRAMEWORK),
        (json.__file__, Owner.PYTHON),
        (contextlib.__file__, Owner.MACHINERY),
        ("<frozen importlib._bootstrap>", Owner.MACHINERY),
        ("<eval_with_key>.3", Owner.MACHINERY),
        ("<string>", Owner.UNNAMED),
        (comparison.__file__, Owner.SUITE),
    ],
)
def test_the_owner_of_a_file_is_told_from_its_name(file, owner):
    assert owner_of(file) is owner
    assert is_users(file) is (owner is Owner.USER)


def test_a_package_that_is_not_installed_has_no_files():
    assert not "/home/me/train.py".startswith(frames._package_folder("no_such_package"))


@pytest.mark.parametrize(
    ("owner", "outside"),
    [
        ("/home/me/train.py", True),
        (f"{PACKAGES}/transformers/trainer.py", True),
        (json.__file__, True),
        (f"{TORCH}autograd/graph.py", False),
        ("<string>", False),
        (comparison.__file__, False),
    ],
)
def test_a_line_of_a_library_can_be_shown_where_torchs_own_cannot(owner, outside):
    assert is_outside_torch(owner) is outside
