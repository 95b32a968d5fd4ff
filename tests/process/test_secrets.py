"""A password comes by file or environment, and goes nowhere else: no log, no `ps`, no error, no metric."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from edgellm_producer import Producer
from edgellm_producer.cli import main as producer_main
from edgellm_worker.cli.main import main
from tests.support.daemons import TINY
from tests.support.fleet import ServeProcess
from tests.support.redis_server import RedisServer, wait_until

SECRET = "hunter2-b7d1"


@pytest.fixture
def guarded(default_server: RedisServer, queue_name: str):
    """A user of this queue whose password is the secret; its name."""
    user = f"u-{queue_name}"
    with default_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", user, "on", f">{SECRET}", "~*", "&*", "+@all")
        yield user
        admin.acl_deluser(user)


def command_lines(root: int) -> str:
    """Of a process and all below it, as `ps` shows them."""
    found, todo = "", [root]
    while todo:
        pid = todo.pop()
        found += Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") + "\n"
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            todo += [int(child) for child in children.read_text().split()]
    return found


async def test_a_serving_worker_shows_its_password_nowhere(default_server, guarded, queue_name, tmp_path) -> None:
    (tmp_path / "password").write_text(SECRET + "\n")
    url = f"unix://{guarded}@{default_server.socket_path}"
    flags = ("--redis-url", url, "--redis-password-file", str(tmp_path / "password"))
    with ServeProcess(default_server, queue_name, tmp_path, *flags) as worker:
        worker.wait_ready()
        async with Producer(url, queue=queue_name, password=SECRET) as producer:
            reply = await (await producer.submit("def f(", max_tokens=2)).result(timeout=30)
            assert reply.worker
            with default_server.client() as admin:
                admin.execute_command("ACL", "SETUSER", guarded, "resetpass", ">changed")
                admin.client_kill_filter(user=guarded)
                wait_until(lambda: "not renewed" in worker.log.read_text(), "the worker to be refused", 20)
                admin.execute_command("ACL", "SETUSER", guarded, f">{SECRET}")
            await (await producer.submit("def g(", max_tokens=2)).result(timeout=30)
        shown = command_lines(worker.process.pid)
        assert "edgellm" in shown
        pages = [shown, *(worker.get(path)[1] for path in ("/metrics", "/health/ready", "/health/live"))]
        worker.send(signal.SIGTERM)
        assert worker.wait() == 143
        pages.append(worker.log.read_text())
        assert "invalid username-password pair" in pages[-1]
        assert [page for page in pages if SECRET in page] == []


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@127.0.0.1:1",
        f"redis+sentinel://u:{SECRET}@127.0.0.1:1/main?sentinel_password={SECRET}",
        f"redis+cluster://u:{SECRET}@127.0.0.1:1",
        f"redis+cluster://u:{SECRET}@127.0.0.1:1/7",
        f"what://u:{SECRET}@127.0.0.1:1",
        f"redis://u:{SECRET}@127.0.0.1:port",
    ],
)
def test_no_error_repeats_a_url(url, capsys) -> None:
    assert main(["check", "--model", str(TINY)], {"EDGELLM_REDIS_URL": url}) in {2, 3}
    worker_said = capsys.readouterr()
    assert worker_said.err
    assert producer_main(["status", "--redis-url", url, "x"]) in {2, 3}
    said = capsys.readouterr()
    assert said.err
    assert SECRET not in worker_said.err + worker_said.out + said.err + said.out


def test_a_wrong_password_is_not_repeated(default_server, guarded, capsys) -> None:
    url = f"unix://{guarded}@{default_server.socket_path}"
    environment = {"EDGELLM_REDIS_URL": url, "EDGELLM_REDIS_PASSWORD": SECRET + "-wrong"}
    assert main(["check", "--model", str(TINY)], environment) == 3
    said = capsys.readouterr().err
    assert "invalid username-password pair" in said
    assert SECRET not in said
