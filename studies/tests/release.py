"""Build what is published, and try it as its users will: `tox -e release` calls it.

    python -m studies.tests.release [FOLDER]

The sdist and the wheel go to FOLDER (default dist). The wheel, which is built from the sdist, is
installed in a fresh environment, where the commands of the README and some tests of the sdist run on
the installed package. The sdist then takes its place there. Nothing is uploaded.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TESTS = ("tests/core", "tests/docs/test_pages.py", "-k", "core or README")
"""Tests of the sdist: those of plain data, and every command of the README as a reader would run it."""


def wrong_versions(root: Path) -> Iterator[str]:
    """Yield what does not speak of the version that `pyproject.toml` has."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    for name, wanted in (
        (
            "CHANGELOG.md",
            rf"<!-- towncrier release notes start -->\n\n## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n",
        ),
        ("CITATION.cff", rf"^version: {re.escape(version)}$"),
        ("pyproject.toml", rf"/v{re.escape(version)}/CHANGELOG\.md"),
    ):
        if not re.search(wanted, (root / name).read_text(), re.MULTILINE):
            yield f"{name} does not have version {version}"
    if left := sorted(path.name for path in (root / "changelog.d").glob("*.*.md")):
        yield f"changelog.d still has {', '.join(left)}: move them into the section of {version} in CHANGELOG.md"


def wrong_links(root: Path, readme: str, published: str) -> Iterator[str]:
    """Yield the README's links that lead nowhere in the repository, and those that an index cannot
    follow.
    """
    for target in LINK.findall(readme):
        file, _, heading = target.partition("#")
        if target.startswith("http"):
            continue
        if not (root / file).exists():
            yield f"README.md: {target}: no such file"
        elif heading and heading not in anchors((root / file).read_text()):
            yield f"README.md: {target}: no such heading"
    yield from (
        f"on an index: {target} is relative"
        for target in LINK.findall(published)
        if not target.startswith(("http", "#"))
    )


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def published_readme(wheel: Path) -> str:
    """Return the text that an index shows of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(name)).get_payload()
    assert isinstance(found, str)
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, show it, and say how long it took.

    Raises:
        SystemExit: it failed.
    """
    print("$", *command, flush=True)
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    began = time.monotonic()
    status = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=alone, check=False
    ).returncode
    print(f"release: {time.monotonic() - began:.0f} s", flush=True)
    if status:
        raise SystemExit(f"release: status {status} of {' '.join(map(str, command))}")


def expect(problems: Iterator[str]) -> None:
    """Refuse to go on where there is a problem.

    Raises:
        SystemExit: there is one; all are named.
    """
    if found := list(problems):
        raise SystemExit("\n".join(f"release: {one}" for one in found))


def promised_pythons(root: Path) -> list[str]:
    """Return the versions of Python that the metadata names, such as `"3.14"`."""
    listed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)$", "\n".join(listed), re.MULTILINE)


def interpreter(version: str) -> str | None:
    """Return the command that starts a version of Python, or None where it is not installed."""
    command = shutil.which(f"python{version}")
    # a version manager may have a command for a version that it does not start
    if command is None or subprocess.run([command, "-c", ""], check=False).returncode:
        return None
    return command


def try_installed(archive: Path, folder: Path, python: str, extra: str = "") -> None:
    """Install an archive in a fresh environment, and run there what the README promises.

    Args:
        archive: sdist or wheel.
        folder: a new one, for the environment.
        python: the command that starts the interpreter.
        extra: of the package, as `"[test]"`.
    """
    run(python, "-m", "venv", folder)
    constraints = ROOT / "constraints.txt"
    pip = (folder / "bin" / "python", "-m", "pip")
    run(*pip, "install", "-q", "-c", constraints, f"{archive}{extra}")
    run_commands(folder)


def run_commands(folder: Path) -> None:
    """Run what the README promises, in an empty folder.

    Args:
        folder: of the environment.
    """
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    run(folder / "bin" / "gradcheck-suite", "doctor", cwd=empty)
    run(
        folder / "bin" / "gradcheck-suite",
        "verify",
        "zero_",
        "set_to_none",
        "--examples",
        "20",
        cwd=empty,
    )


def run_tests(folder: Path, sources: Path) -> None:
    """Run tests of the sdist on what was installed.

    Args:
        folder: of the environment.
        sources: the sdist, unpacked, without the package: what is tested is what was installed.
    """
    pytest = (folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(*pytest, *TESTS, cwd=sources)


def draw_pictures(folder: Path) -> None:
    """Draw the README's and the guide's pictures anew by what was installed.

    Args:
        folder: of the environment.
    """
    python = folder / "bin" / "python"
    run(python, ROOT / "docs" / "verdict_picture.py")
    if shutil.which("chromium") is None:
        print("release: the pictures of pages were not drawn: chromium is not installed here")
    else:
        run(python, ROOT / "docs" / "screenshots.py")


def main(out: Path) -> None:
    """Build, check and try a release."""
    expect(wrong_versions(ROOT))
    run("cffconvert", "--validate", "-i", "CITATION.cff")
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    expect(wrong_links(ROOT, (ROOT / "README.md").read_text(), published_readme(wheel)))
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (sources,) = Path(folder).iterdir()
        shutil.rmtree(sources / "gradcheck_suite")
        environment = Path(folder) / "environment"
        try_installed(wheel, environment, sys.executable, "[test]")
        run_tests(environment, sources)
        pip = (environment / "bin" / "python", "-m", "pip")
        run(*pip, "install", "-q", "--no-deps", "--force-reinstall", sdist)
        run_commands(environment)
        draw_pictures(environment)
        not_found = []
        for version in promised_pythons(ROOT):
            python = interpreter(version)
            if python is None:
                not_found.append(version)
            elif version != f"{sys.version_info.major}.{sys.version_info.minor}":
                try_installed(wheel, Path(folder) / version, python)
    if not_found:
        print(f"release: not tried under Python {', '.join(not_found)}: not installed here")
    print(f"release: {sdist.name} and {wheel.name} in {out} are ready")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve())
