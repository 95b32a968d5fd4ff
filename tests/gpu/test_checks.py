"""The checks of `make gpu` that can be right or wrong, as tests; what it measures stays there."""

from __future__ import annotations

import pytest

from bench.gpu.run_all import device, run_step
from edgellm_worker.engine.errors import EngineFault

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> str:
    try:
        return device()
    except EngineFault as error:
        pytest.skip(f"no GPU to run on ({error})")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", ["parity", "generation", "main job"])
def test_what_runs_on_the_gpu_is_what_the_reference_computes(gpu: str, step: str) -> None:
    """Ops with random shapes, whole generations, and the product's commands with jobs in flight."""
    assert run_step(step) == 0, f"{step} on {gpu}: its output says which check failed"
