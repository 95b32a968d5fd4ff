"""A builder in a process of its own: `python -m edgellm_worker.engine.build.child`, its order as JSON on stdin.

    {"model_dir": ..., "spec": ..., "flavour": "tensorrt", "part": [i, n], "out": ...}

It records the model's passes, compiles every n-th network from the i-th on, and writes `<key>.plan` files to `out`; the
first one also what the canary must write. A compiler that crashes, or is killed for memory, takes this process and not
the worker's. It ends with the process that started it: whoever kills a build is rid of all of it, and nobody writes to
a folder that the next build has removed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_worker.engine.build import canary
from edgellm_worker.engine.build.builder import Builder
from edgellm_worker.engine.build.spec import REFUSED, EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.child.process import end_with_parent
from edgellm_worker.engine.errors import EngineFault, NetworkRefused
from edgellm_worker.engine.models.registry import read_model
from edgellm_worker.engine.trt import Flavour, load_library


def compile_part(order: Mapping[str, Any]) -> int:
    """-> how many networks were compiled. Raises `BuildError`, `CheckpointError`."""
    spec = EngineSpec.read(order["spec"])
    checkpoint = open_checkpoint(Path(order["model_dir"]), read_values=False)
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    segments = spec.segments(model, spec.reader(has_values=False))
    builder = Builder(load_library(Flavour(order["flavour"])), spec.settings)
    index, count = order["part"]
    mine = sorted(segments)[index::count]
    for key in mine:
        Path(order["out"], f"{key}.plan").write_bytes(builder.compile(segments[key], spec.ranges))
    if index == 0 and (recorded := canary.record(model, spec, checkpoint.path)) is not None:
        Path(order["out"], canary.FILE).write_text(json.dumps(recorded.as_json()))
    return len(mine)


def main() -> int:
    end_with_parent()
    try:
        compile_part(json.load(sys.stdin))
    except NetworkRefused as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except EngineFault as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
