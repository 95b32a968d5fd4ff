"""The process that runs the vendor's builder: ``python -m edgellm_worker.engine.edgellm.builder_child RESULT``.

It reads one JSON object from standard input and writes one to the file RESULT:

    {"action": "probe"}                                  -> {"tensorrt": "10.16.0.72", "gpu": "sm110"}
    {"action": "build", "argv": [...], "corrects_feedback": true}  -> {"feedback": "corrected"}

The vendor's builder logs and prints as it likes: both streams are the parent's log file. What it raises ends the
process with a traceback there and status 1; status 3 says that the correction found no place, status 4 that the vendor
has nothing for this machine. Both put their reason on the last line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from edgellm_worker.engine.edgellm.feedback import Feedback, FeedbackCorrection, NoPlaceForCorrectionError

EXIT_NO_PLACE_FOR_CORRECTION: Final = 3
EXIT_UNSUPPORTED_MACHINE: Final = 4


class UnsupportedMachineError(Exception):
    """The vendor's own words."""


def probe() -> dict[str, str]:
    """What a bundle's fitness depends on besides the package: TensorRT's version and the GPU."""
    from tensorrt_edgellm._native import detect  # noqa: PLC0415 - this process exists to import it

    try:
        platform = detect.detect_platform()
    except RuntimeError as error:  # the base of the vendor's errors
        raise UnsupportedMachineError(f"{error}") from error
    try:
        tensorrt = metadata.version("tensorrt")
    except metadata.PackageNotFoundError:  # JetPack's own package may come without metadata
        tensorrt = platform.tensorrt_runtime_soname
    return {"tensorrt": tensorrt, "gpu": f"sm{platform.gpu_sm}"}


def build(order: Mapping[str, Any]) -> dict[str, str]:
    correction = FeedbackCorrection()
    if order["corrects_feedback"]:
        correction.install()
    from experimental.builder.cli import main  # noqa: PLC0415 - the vendor's package of that name

    main(order["argv"])
    outcome = correction.outcome if order["corrects_feedback"] else Feedback.AS_SHIPPED
    return {"feedback": str(outcome)}


def run(result: Path, order: Mapping[str, Any]) -> int:
    try:
        answer = probe() if order["action"] == "probe" else build(order)
    except NoPlaceForCorrectionError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the log file of the build
        return EXIT_NO_PLACE_FOR_CORRECTION
    except UnsupportedMachineError as error:
        print(error, file=sys.stderr)  # noqa: T201 - as above
        return EXIT_UNSUPPORTED_MACHINE
    result.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), json.load(sys.stdin)))
