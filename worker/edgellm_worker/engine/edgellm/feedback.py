"""One correction of the vendor's builder: which hidden state an MTP draft hands to its next step.

A Qwen3.5 MTP head ends in `mtp.norm`, and the hidden state that the next draft step receives is the one *after* that
norm: the reference implementations and the vendor's own ONNX exporter agree on it. The direct builder of 0.11.0 marks
the state before the norm as the draft's output. Verified text is the same either way; drafts from the second on are
accepted less often, because the norm's gain is missing from their input.

The correction looks at the data flow, not at a version: while the vendor's `forward` runs, calls of the draft's norm
are recorded; if the tensor that it returns as hidden state is one that went *into* the norm, what came *out* is
returned instead. A version without the defect passes unchanged.
"""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import Any, Final

MODULE: Final = "experimental.builder.models.qwen3_5.modeling_qwen3_5_mtp"
CLASS: Final = "Qwen35MtpDraftModel"
_OUTPUT: Final = "hidden_states"


class Feedback(StrEnum):
    """What became of the draft's hidden-state output in one build."""

    CORRECTED = "corrected"
    ALREADY_NORMED = "already-normed"  # this version of the builder has no such defect
    AS_SHIPPED = "as-shipped"  # asked for: nothing was touched
    NO_DRAFT = "no-draft"  # no draft was built


class NoPlaceForCorrectionError(Exception):
    """This version of the builder has no such class: nobody knows which hidden state its drafts hand on."""


class FeedbackCorrection:
    """Wraps the draft's `forward` for one build; `outcome` is known after it."""

    def __init__(self) -> None:
        self.outcome = Feedback.NO_DRAFT

    def install(self) -> None:
        """Raises `NoPlaceForCorrectionError`."""
        try:
            model_class = getattr(importlib.import_module(MODULE), CLASS)
        except (ImportError, AttributeError) as error:
            raise NoPlaceForCorrectionError(f"{MODULE}.{CLASS} does not exist: {error}") from error
        self.wrap(model_class)

    def wrap(self, model_class: Any) -> None:
        as_shipped = model_class.forward
        correction = self

        def forward(model: Any, **inputs: Any) -> Any:
            norm = model.norm
            calls: list[tuple[Any, Any]] = []

            def recording_norm(hidden: Any) -> Any:
                normed = norm(hidden)
                calls.append((hidden, normed))
                return normed

            model.norm = recording_norm
            try:
                outputs = as_shipped(model, **inputs)
            finally:
                model.norm = norm
            correction.mend(outputs, calls)
            return outputs

        model_class.forward = forward

    def mend(self, outputs: dict[str, Any], calls: list[tuple[Any, Any]]) -> None:
        for before, after in calls:
            if outputs[_OUTPUT] is before:
                outputs[_OUTPUT] = after
                self.outcome = Feedback.CORRECTED
                return
        self.outcome = Feedback.ALREADY_NORMED
