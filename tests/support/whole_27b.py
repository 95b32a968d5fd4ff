"""The public 27B's verify pass as one network, compiled: `python -m tests.support.whole_27b 64` prints what it came to.

A process of its own, so that its peak of memory is its own.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from typing import Any

from edgellm_worker.engine.build.builder import Builder, BuildSettings
from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.trt import Flavour, Target, load_library
from tests.support.tensorrt_models import qwen_27b

SPEC = EngineSpec(4, 4096, 6, KvDtype.FP8, target=Target.SM121, runs_fp8=True, runs_fp4=True)
"""4 rows x 6 positions over an FP8 cache of 4096, for DGX Spark; the checkpoint's mixed FP8 and W4A16 weights."""


class NamingBuilder(Builder):
    """Keeps the names of what goes into the network and comes out of it."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def _serialized(self, network: Any, config: Any) -> bytes:
        self.inputs = tuple(network.get_input(index).name for index in range(network.num_inputs))
        self.outputs = tuple(network.get_output(index).name for index in range(network.num_outputs))
        return super()._serialized(network, config)


def first_layers(model: Model, count: int) -> Model:
    return replace(model, base=replace(model.base, layers=model.base.layers[:count]))


def compiled(num_layers: int) -> dict[str, Any]:
    model = first_layers(qwen_27b(), num_layers)
    # Level 0: without a GPU no kernel is timed, so that the levels give plans of one size.
    builder = NamingBuilder(load_library(Flavour.TENSORRT_RTX), BuildSettings(SPEC.target, optimization_level=0))
    plan = builder.compile_whole(Recorder(model, SPEC.layout, SPEC.reader()).verify(4, 6))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "inputs": builder.inputs,
        "outputs": builder.outputs,
        "plan_bytes": len(plan),
        "peak_bytes": used.ru_maxrss << 10,
        "cpu_s": used.ru_utime + used.ru_stime,
    }


if __name__ == "__main__":
    print(json.dumps(compiled(int(sys.argv[1]))))
