"""A real Prometheus scrapes a worker under load: every panel and alert is asked, and answers."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator

import pytest
import yaml

from edgellm_producer import JobRejected, Producer
from grafana.boards import BOARDS
from grafana.panel import Panel
from grafana.shapes import NO_DEVICE
from tests.support.live_worker import live_worker
from tests.support.prometheus import RULES, Prometheus, running_prometheus
from tests.support.promql import concrete, selectors

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
    pytest.mark.xdist_group("prometheus"),
]

PANELS = [pytest.param(panel, id=f"{board.uid}-{panel.title}") for board in BOARDS for panel in board.panels]
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
NUM_JOBS = 24
SCRAPES_UNDER_LOAD = 5
DEVICE_SERIES = {"edgellm_device_throttled"}


async def load(redis_url: str) -> None:
    """Greedy and sampled jobs in all lanes, and one that the worker refuses."""
    async with Producer(redis_url) as producer:
        jobs = [
            await producer.submit(
                f"def function_{number}(",
                max_tokens=48,
                temperature=0.0 if number % 2 else 0.8,
                priority=("high", "normal", "low")[number % 3],
            )
            for number in range(NUM_JOBS)
        ]
        refused = await producer.submit("def", model="another-model")
        for job in jobs:
            await job.result(timeout=60)
        with pytest.raises(JobRejected):
            await refused.result(timeout=60)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    import asyncio

    folder = tmp_path_factory.mktemp("prometheus")
    with live_worker() as worker, running_prometheus([f"127.0.0.1:{worker.metrics_port}"], folder) as server:
        wait_for_scrapes(server, 2)
        asyncio.run(load(worker.redis_url))
        wait_for_scrapes(server, int(server.num_samples("edgellm_redis_up")) + 3)
        yield server


def wait_for_scrapes(server: Prometheus, count: int) -> None:
    deadline = time.monotonic() + 30
    while server.num_samples("edgellm_redis_up") < count:
        assert time.monotonic() < deadline, "prometheus does not scrape"
        time.sleep(0.2)


@pytest.mark.parametrize("panel", PANELS)
def test_panel_has_data_under_load(prometheus: Prometheus, panel: Panel):
    for query in panel.queries:
        values = prometheus.values(concrete(query.expr))
        if not any(math.isfinite(value) for value in values):
            assert panel.when_empty == NO_DEVICE, f"{query.expr} gave {values}"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_reads_series_that_are_there_and_is_silent(prometheus: Prometheus, rule: dict):
    for selector in selectors(rule["expr"]):
        labels = ",".join(f'{name}=~"{value}"' for name, value in selector.matchers.items())
        if selector.series not in DEVICE_SERIES:
            assert prometheus.values(f"{selector.series}{{{labels}}}"), selector
    assert prometheus.values(rule["expr"]) == []


def test_prometheus_evaluates_every_rule(prometheus: Prometheus):
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in ALERTS}
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}


def test_jobs_and_tokens_are_counted(prometheus: Prometheus):
    assert sum(prometheus.values("edgellm_request_success_total")) == NUM_JOBS
    assert prometheus.values('edgellm_request_failure_total{code="model_not_found"}') == [1.0]
    assert prometheus.values("edgellm_generation_tokens_total")[0] > NUM_JOBS
    assert prometheus.values("edgellm_spec_decode_num_accepted_tokens_total")[0] > 0
    assert prometheus.values("max(edgellm_queue_length)") == [0.0]
