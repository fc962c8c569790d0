"""Run the script of each finding on the newest release that installs here, and say which findings
are fixed upstream.

    python -m studies.tests.findings [WORD ...]

runs those whose path under `reports/findings/` has one of the words, all without one, and writes
what they print into the table of `reports/findings/README.md`. Each package is installed in an
environment of its own, on top of this one. What was given up, which the finding's versions say, is
installed in the version that the finding was made on. A script that only repeats the rule of a
repository's file runs on this environment's torch.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "findings"
INDEX = FOLDER / "README.md"
PACKAGES = (
    "transformers",
    "accelerate",
    "lightning",
    "keras",
    "pytorch_accelerated",
    "poutyne",
    "fastai",
    "deepspeed",
    "optax",
    "flax",
    "diffusers",
    "jaxonmodels",
    "ablang2",
    "ablang_jax",
    "equimo",
    "mamba2_jax",
    "mace",
    "trainer",
)
DISTRIBUTIONS = {"ablang_jax": "ablanx", "mace": "mace-torch", "trainer": "coqui-tts-trainer"}
"""What is installed for a module of another name."""
LIMIT_S = 300


@dataclass(frozen=True)
class Finding:
    """A finding: its file, its script and what that prints while the fault is there."""

    path: Path
    script: str
    printed: str
    versions: str

    @property
    def packages(self) -> list[str]:
        """What the script needs beside torch, the project's own first.

        Nothing where it repeats a repository's file.
        """
        found = [
            name
            for name in PACKAGES
            if re.search(rf"^(?:from|import) .*\b{name}\b", self.script, re.MULTILINE)
        ]
        if "transformers" in found:
            found.append("accelerate")  # its Trainer asks for it
        installed = (DISTRIBUTIONS.get(name, name).replace("_", "-") for name in found)
        named = sorted(dict.fromkeys(installed))
        return sorted(named, key=lambda name: name != self.path.parent.name)

    @property
    def package(self) -> str | None:
        """The package that the finding is about, if the script runs it."""
        return next(iter(self.packages), "torch" if self.path.parent.name == "torch" else None)

    @property
    def wanted(self) -> list[str]:
        """What is installed: the newest release of each package, or the finding's own of what was
        given up.
        """
        pinned = (
            {self.package: f"{self.package}=={self.tried}"}
            if "the last version with" in self.versions
            else {}
        )
        return [pinned.get(name, name) for name in self.packages]

    @property
    def tried(self) -> str:
        """The release that the finding was made on.

        For the file of a repository its first words on versions.
        """
        if self.package:
            match = re.search(rf"{self.package} (\d+\.\d+\.\d+)", self.versions)
            assert match, f"{self.path}: no version of {self.package}"
            return match[1]
        match = re.search(r"\bat (\w{7,})", self.versions)
        assert match, f"{self.path}: no commit"
        return f"commit {match[1]}"

    @property
    def title(self) -> str:
        """What is wrong, with the project's name first."""
        return self.path.read_text().partition("\n")[0].removeprefix("# ")

    @property
    def who(self) -> str:
        """Who is hit, as the end of `You are hit if`."""
        return self._said(r"^You are hit if (.+?)\.(?: [A-Z]|$)") or ""

    @property
    def since(self) -> str:
        """The release or commit that the fault came with, as far as that is known."""
        return self._said(r"\bSince: (.+?)\.(?: |$)") or f"seen in {self.tried}"

    def fixed(self, index: str) -> str:
        """Return what has fixed it; no release where the newest that was run has it still.

        Args:
            index: the text of the index, which says what was run.
        """
        if said := self._said(r"\bFixed in: (.+?)\.(?: |$)"):
            return said
        cells = next(line for line in index.split("\n") if line.startswith(row(self))).split(" | ")
        ran = cells[-2].partition("+")[0] if self.package else self.tried
        return f"not in {ran}" if cells[-1].rstrip(" |") in ("still there", "as described") else "?"

    def _said(self, pattern: str) -> str | None:
        match = re.search(pattern, self.versions, re.MULTILINE)
        return match[1] if match else None


def read(path: Path) -> Finding:
    """Read a finding."""
    text = path.read_text()
    script, printed = (
        re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text")
    )
    assert script, f"{path}: expected a block of python"
    assert printed, f"{path}: expected a block of text"
    return Finding(path, script[1], printed[1], text[text.rindex("\n## ") :])


def findings() -> list[Finding]:
    """Return all findings, by project."""
    return [read(path) for path in sorted(FOLDER.glob("*/*.md"))]


def environment_for(finding: Finding, folder: Path) -> tuple[Path, str]:
    """Make an environment on top of this one with the newest releases.

    Return its Python and the version that is tried.

    Raises:
        CalledProcessError: a package does not install.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if finding.packages:
        # a package that takes a newer torch would bring gigabytes of CUDA from PyPI
        torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
        pip = ("-m", "pip", "install", "-q", "--upgrade")
        _output(python, *pip, torch, *finding.wanted, check=True)
    asked = (
        f"from importlib.metadata import version; print(version({finding.package or 'torch'!r}))"
    )
    return python, _output(python, "-c", asked, check=True).strip()


def _output(python: Path, *arguments: str, check: bool = False, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=cwd
    )
    if done.returncode and check:
        raise subprocess.CalledProcessError(done.returncode, arguments, done.stdout, done.stderr)
    return (
        done.stdout
        if not done.returncode
        else f"{done.stdout}{(done.stderr.strip().splitlines() or [''])[-1]}"
    )


def state(finding: Finding, printed: str) -> str:
    """Return what a run of the script says of a finding."""
    if printed == finding.printed:
        return "still there" if finding.package else "as described"
    return f"prints `{' / '.join(printed.split(chr(10)))[:80].strip()}`: read it again"


def run(finding: Finding) -> tuple[str, str]:
    """Return the newest release that installs here, and the state of a finding on it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            python, version = environment_for(finding, Path(folder) / "environment")
        except subprocess.CalledProcessError as error:
            return (
                "none",
                f"does not install here: {(error.stderr.strip().splitlines() or [''])[-1][:80]}",
            )
        script = Path(folder) / "script.py"
        script.write_text(finding.script)
        try:
            printed = _output(python, str(script), cwd=Path(folder))
        except subprocess.TimeoutExpired:
            return version, f"no end within {LIMIT_S} s"
    return version if finding.package else f"torch {version}", state(finding, printed)


def row(finding: Finding) -> str:
    """Return the first cells of a finding's row: project, file, and the release that it was found
    on.
    """
    name = finding.path.relative_to(FOLDER)
    return f"| {name.parent} | [{name.stem}]({name.as_posix()}) | {finding.tried} |"


def known() -> list[list[str]]:
    """Return the cells of the guide's table: the file, what is wrong, since when, what has fixed
    it, and who is hit.
    """
    index = INDEX.read_text()
    return [
        [
            f"[`{one.path.stem}`](../reports/findings/{one.path.relative_to(FOLDER).as_posix()})",
            one.title,
            one.since,
            one.fixed(index),
            one.who,
        ]
        for one in findings()
    ]


def main(words: list[str]) -> None:
    """Run the findings that are asked for, and write their rows."""
    for finding in findings():
        if words and not any(word in str(finding.path.relative_to(FOLDER)) for word in words):
            continue
        version, found = run(finding)
        line = f"{row(finding)} {version} | {found} |"
        print(line, flush=True)
        text = INDEX.read_text()
        start = row(finding).split("](")[0]
        INDEX.write_text(
            "\n".join(line if old.startswith(start) else old for old in text.split("\n"))
        )


if __name__ == "__main__":
    main(sys.argv[1:])
