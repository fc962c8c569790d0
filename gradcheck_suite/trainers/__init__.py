"""Real trainers as loops, by name: what is listed here is data; a trainer is imported when it is named, never before.

Adding a trainer is one row in `TRAINERS` and one function that takes a `TrainingRun`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.schema.contract import Loop


@dataclass(frozen=True)
class Trainer:
    """A trainer that can be a subject.

    Attributes:
        name: by which `verify` takes it.
        packages: the distributions that must be installed, the trainer's own first; it names the suite's extra, too.
        place: `module:function` of the loop.
        tested: versions of its own package that the adapter was tested with.
        about: one line on what runs.
    """

    name: str
    packages: tuple[str, ...]
    place: str
    tested: tuple[str, ...]
    about: str

    @property
    def package(self) -> str:
        """The trainer's own distribution."""
        return self.packages[0]

    @property
    def version(self) -> str | None:
        """The version that is installed, or None."""
        return _version(self.package)

    @property
    def missing(self) -> str | None:
        """Why it cannot be imported and what to do, or None."""
        absent = [name for name in self.packages if _version(name) is None or importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return f"{self.name} needs {' and '.join(absent)}, not installed here: pip install {' '.join(absent)}"

    @property
    def note(self) -> str | None:
        """What to know about the installed version, or None where it is a tested one."""
        version = self.version
        if version is None or version in self.tested:
            return None
        tested = " and ".join(self.tested)
        return f"{self.name} is tested with {self.package} {tested}; {version} is installed, and is run all the same"

    @property
    def status(self) -> str:
        """The installed version, or that there is none."""
        if self.version is None:
            return f"{self.package} is not installed"
        return f"{self.package} {self.version}"

    def load(self) -> Loop:
        """Import the trainer and return its loop.

        Raises:
            CannotRunHere: it is not installed, or its import fails.
        """
        if reason := self.missing:
            raise CannotRunHere(reason)
        module, _, function = self.place.partition(":")
        try:
            loop: Loop = getattr(importlib.import_module(module), function)
        except Exception as error:  # whatever a broken or foreign version raises
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise CannotRunHere(
                f"{self.name} cannot be loaded with {self.package} {self.version} ({message}); "
                f"it is tested with {' and '.join(self.tested)}"
            ) from error
        return loop


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rows(
    packages: tuple[str, ...], module: str, tested: tuple[str, ...], *loops: tuple[str, str, str]
) -> list[Trainer]:
    place = f"gradcheck_suite.trainers.{module}"
    return [Trainer(name, packages, f"{place}:{function}", tested, about) for name, function, about in loops]


_ALL = [
    *_rows(
        ("transformers", "accelerate"),
        "huggingface",
        ("4.45.2", "5.23.0"),
        ("hf-trainer", "hf_trainer", "transformers.Trainer; the model accepts the count of targets"),
        ("hf-trainer-plain", "hf_trainer_plain", "transformers.Trainer; the model's forward takes no such count"),
        ("hf-trainer-loss-func", "hf_trainer_loss_func", "transformers.Trainer with compute_loss_func"),
        ("hf-trainer-smoothing", "hf_trainer_smoothing", "transformers.Trainer with label_smoothing_factor=0.1"),
    ),
    *_rows(
        ("accelerate",),
        "hf_accelerate",
        ("1.15.0",),
        ("accelerate", "accelerate", "Accelerate's accumulate(), as its guide prints it"),
        ("accelerate-counted", "accelerate_counted", "Accelerate's recipe for samples of variable size"),
        ("accelerate-no-sync", "accelerate_no_sync", "Accelerate's no_sync() in a loop that counts and divides itself"),
        ("accelerate-scaler", "accelerate_scaler", "Accelerate's accumulate() in fp16, with its GradScaler; CUDA only"),
    ),
    *_rows(
        ("lightning",),
        "lightning_trainer",
        ("2.6.6",),
        ("lightning", "lightning", "lightning.Trainer(accumulate_grad_batches=K)"),
        ("lightning-manual", "lightning_manual", "lightning.Trainer with manual optimization, as its guide prints it"),
    ),
    *_rows(
        ("lightning",),
        "lightning_fabric",
        ("2.6.6",),
        ("fabric", "fabric", "Lightning Fabric in a loop that counts and divides itself"),
        ("fabric-printed", "fabric_printed", "Lightning Fabric's accumulation, as its guide prints it"),
    ),
]
TRAINERS: dict[str, Trainer] = {trainer.name: trainer for trainer in _ALL}
"""Every trainer by name."""
