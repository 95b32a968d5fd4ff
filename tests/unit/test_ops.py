"""Every op of the vocabulary against plain loops in float64, and what only the numpy backend promises."""

import numpy as np
import pytest

from edgellm_worker.engine.ops.api import DeltaPending, Ops
from edgellm_worker.engine.ops.reference import NumpyOps
from tests.support.op_cases import OpCase, op_cases

CASES = op_cases()


def vocabulary() -> set[str]:
    return {name for name in vars(Ops) if not name.startswith("_")}


def test_every_op_has_a_parity_case():
    assert {case.op for case in CASES} == vocabulary()


def test_the_numpy_backend_has_every_op():
    assert all(callable(getattr(NumpyOps, name, None)) for name in vocabulary())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_equals_plain_loops(case: OpCase):
    given = {
        name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in case.inputs.items()
    }
    expected = case.expected(**given)
    outputs = case.call(NumpyOps(), *(value.copy() for value in given.values()))
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.shape == wanted.shape
        as_float = output.astype(np.float64)
        assert np.isfinite(as_float).all()
        np.testing.assert_allclose(as_float, wanted, rtol=case.tolerance, atol=case.tolerance)


def test_folding_nothing_leaves_the_state_bit_for_bit():
    rng = np.random.default_rng(1)
    state = rng.standard_normal((2, 4, 5, 7)).astype(np.float32)
    pending = DeltaPending(
        *(rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 2, 5), (2, 3, 4, 7), (2, 3, 4)))
    )
    folded = NumpyOps().delta_fold(state.copy(), pending, np.array([0, 2], np.int32))
    assert folded[0].tobytes() == state[0].tobytes()
    assert not np.array_equal(folded[1], state[1])


def test_a_rejected_pending_row_does_not_matter():
    rng = np.random.default_rng(2)
    state = rng.standard_normal((1, 4, 5, 7)).astype(np.float32)
    k, u = rng.standard_normal((1, 3, 2, 5)).astype(np.float32), rng.standard_normal((1, 3, 4, 7)).astype(np.float32)
    log_g = -rng.random((1, 3, 4)).astype(np.float32)
    commit = np.array([2], np.int32)
    one = NumpyOps().delta_fold(state, DeltaPending(k, u, log_g), commit)
    k[:, 2], u[:, 2], log_g[:, 2] = 1e6, -1e6, -1e6
    assert np.array_equal(one, NumpyOps().delta_fold(state, DeltaPending(k, u, log_g), commit))
