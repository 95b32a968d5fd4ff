"""Ready and alive, as rules and over HTTP."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from edgellm_worker.health import HealthSnapshot, WorkerState, not_live, not_ready, state_of
from edgellm_worker.metrics.server import MetricsServer

READY = HealthSnapshot(WorkerState.READY)

CASES = [
    pytest.param(READY, WorkerState.READY, [], id="ready"),
    pytest.param(HealthSnapshot(WorkerState.LOADING), WorkerState.LOADING, ["loading"], id="loading"),
    pytest.param(HealthSnapshot(WorkerState.DRAINING), WorkerState.DRAINING, ["draining"], id="draining"),
    pytest.param(
        replace(READY, redis_age_s=12.0), WorkerState.NO_REDIS, ["no reply from Redis for 12 s"], id="without Redis"
    ),
    pytest.param(
        replace(READY, engine_ready=False), WorkerState.RESTARTING, ["engine is not running"], id="engine down"
    ),
    pytest.param(
        replace(READY, engine_age_s=90.0), WorkerState.HUNG, ["engine made no step for 90 s"], id="engine hung"
    ),
]


@pytest.mark.parametrize(("snapshot", "state", "reasons"), CASES)
def test_readiness_says_why(snapshot, state, reasons):
    assert state_of(snapshot) is state
    assert not_ready(snapshot) == reasons
    assert not_live(snapshot) == []


def test_all_reasons_are_given_together():
    worst = HealthSnapshot(WorkerState.DRAINING, 99.0, engine_ready=False, engine_age_s=99.0, loop_age_s=99.0)
    assert len(not_ready(worst)) == 5


def test_a_stuck_event_loop_is_not_alive():
    assert not_live(replace(READY, loop_age_s=61.0)) == ["event loop stuck for 61 s"]
    assert not_live(replace(READY, loop_age_s=59.0)) == []


def get(url: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - our own server
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_over_http():
    snapshots = [READY]
    with MetricsServer(lambda: b"a_metric 1\n", lambda: snapshots[-1], host="127.0.0.1", port=0) as server:
        base = server.url.removesuffix("/metrics")
        status, kind, body = get(server.url)
        assert (status, body) == (200, "a_metric 1\n")
        assert kind.startswith("text/plain; version=")
        assert get(f"{base}/health/ready")[::2] == (200, "ok\n")
        snapshots.append(HealthSnapshot(WorkerState.DRAINING))
        assert get(f"{base}/health/ready")[::2] == (503, "draining\n")
        assert get(f"{base}/health/live")[::2] == (200, "ok\n")
        assert get(f"{base}/other")[0] == 404


@pytest.mark.parametrize(("host", "shown"), [("::1", "http://[::1]:"), ("::", "http://127.0.0.1:")])
def test_over_ipv6(host, shown):
    """`::` listens for IPv4 too."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with MetricsServer(lambda: b"a_metric 1\n", lambda: READY, host=host, port=0) as server:
        assert server.url.startswith(shown)
        assert get(server.url)[0] == 200


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False
