"""What `serve` sets for the whole process goes back with it."""

from __future__ import annotations

import gc

from edgellm_worker.app import _seldom_collected


def test_cycles_are_collected_seldom_while_serving_and_as_before_afterwards():
    before = gc.get_threshold()
    with _seldom_collected():
        assert gc.get_threshold() == (10 * before[0], *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
