"""A worker that starts where it cannot work says so at once, in words that can be acted on."""

from __future__ import annotations

import pytest
from redis.exceptions import ClusterDownError, MovedError

from edgellm_worker.cli.main import main
from edgellm_worker.errors import ExitCode
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.errors import QueueMisconfigured, QueueUnavailable
from edgellm_worker.queue.link import mapped_errors
from edgellm_worker.queue.redis_queue import RedisQueue
from edgellm_worker.queue.rights import COMMANDS, PROBES, Rights, Role
from tests.support.daemons import TINY
from tests.support.queue_rig import Rig
from tests.support.redis_server import RedisServer

BY_THEMSELVES = {"eval", "evalsha", "info", "subscribe"}
"""The server names these when it refuses them; a refused `subscribe` costs a second per cancellation and is logged."""


def url_without(rig: Rig, server: RedisServer, *left_out: str) -> str:
    """A URL of a user that has all rights of a worker but some words of them."""
    user = f"u-{rig.keys.queue}"
    words = [word for word in Rights(Role.WORKER, user, rig.keys.queue).words(">pw") if word not in left_out]
    rig.admin.execute_command("ACL", "SETUSER", user, *words)
    return f"unix://{user}:pw@{server.socket_path}"


def test_every_right_of_a_worker_is_tried() -> None:
    assert {command for command, _ in PROBES} | BY_THEMSELVES == set(COMMANDS[Role.WORKER])


@pytest.mark.parametrize(
    "left_out",
    [
        ("+xclaim",),
        ("+xclaim", "+lpos", "+xgroup|delconsumer"),
        ("+set",),
        ("+info",),
        ("+evalsha",),
        ("~edgellm:{QUEUE}:*",),
        ("&edgellm:{QUEUE}:*",),
    ],
)
async def test_a_right_that_is_missing_is_named_at_the_start(rig: Rig, server: RedisServer, left_out) -> None:
    words = [word.replace("QUEUE", rig.keys.queue) for word in left_out]
    with pytest.raises(QueueMisconfigured) as caught:
        await rig.worker(url=url_without(rig, server, *words))
    rules = str(caught.value).partition("needs: ")[2].partition(";")[0]
    assert rules.split() == sorted(words)
    assert f"edgellm-worker acl --queue {rig.keys.queue}" in str(caught.value)
    assert set(rig.admin.scan_iter(rig.keys.prefix + "*")) == set()


async def test_the_trial_of_rights_leaves_nothing(rig: Rig, server: RedisServer) -> None:
    await rig.worker(url=url_without(rig, server))
    assert set(rig.admin.scan_iter(rig.keys.prefix + "*")) == {*rig.keys.lanes, rig.keys.worker("w1"), rig.keys.lease}


def test_a_missing_right_is_the_operators(one_rig: Rig, default_server: RedisServer, capsys) -> None:
    url = url_without(one_rig, default_server, "+xclaim")
    flags = ["--queue", one_rig.keys.queue, "--metrics-port", "0"]
    assert main(["check", "--model", str(TINY), "--redis-url", url, *flags], {}) == ExitCode.OPERATOR
    assert "+xclaim" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["valkey-9.1", "redis-7.0", "redis-6.2"])
async def test_a_replica_is_called_a_replica(start_server, queue_name: str, version: str) -> None:
    server = start_server(version)
    with server.client() as admin:
        admin.replicaof("127.0.0.1", "1")
    queue = RedisQueue(QueueConfig(url=server.url, queue=queue_name))
    with pytest.raises(QueueUnavailable, match="is a replica"):
        await queue.open()
    await queue.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MovedError("5718 10.0.0.2:6379"), "redis\\+cluster://"),
        (ClusterDownError("Hash slot not served"), "Cluster that is not whole"),
        (TimeoutError(), "no answer in time"),
    ],
)
def test_what_a_cluster_says_is_explained(error: Exception, words: str) -> None:
    with pytest.raises(QueueUnavailable, match=words), mapped_errors():
        raise error
