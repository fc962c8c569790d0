"""Callbacks for trainers that open an audit when training begins and close it when it ends; they do no
more.
"""

from __future__ import annotations

from typing import Any

from gradcheck_suite.auditing.session import audit


def transformers_callback(**options: Any) -> Any:
    """Return a callback for transformers' `Trainer(callbacks=[...])`.

    Its `.audit.result` has the verdict.

    Args:
        options: of `gradcheck_suite.audit`.
    """
    from transformers import TrainerCallback

    class AuditCallback(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.audit = audit(**{"name": "transformers.Trainer", **options})

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.audit.open()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.audit.close()

    return AuditCallback()


def lightning_callback(**options: Any) -> Any:
    """Return a callback for Lightning's `Trainer(callbacks=[...])`.

    Its `.audit.result` has the verdict.

    Args:
        options: of `gradcheck_suite.audit`.
    """
    from lightning.pytorch.callbacks import Callback

    class AuditCallback(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.audit = audit(**{"name": "lightning.Trainer", **options})

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.audit.open()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.audit.close()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self.audit.close(exception)

    return AuditCallback()
