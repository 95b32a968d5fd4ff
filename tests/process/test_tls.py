"""TLS with an authority and client certificates, both required, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from edgellm_producer import Producer
from edgellm_producer.blocking import BlockingProducer
from edgellm_producer.errors import QueueUnreachable
from edgellm_worker.cli.main import main
from edgellm_worker.errors import ExitCode
from tests.support.answering import answering
from tests.support.certificates import Certificates
from tests.support.daemons import TINY
from tests.support.queue_rig import open_rig, renewed
from tests.support.redis_server import RedisServer, free_port

pytestmark = pytest.mark.xdist_group("tls")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates, tls_port: int) -> Iterator[RedisServer]:
    server = RedisServer("redis-7.0", settings=certificates.server_settings(tls_port))
    yield server
    server.close()


async def test_the_main_job_over_tls(tls_server, tls_port, certificates, queue_name) -> None:
    url = certificates.url(tls_port)
    async with open_rig(tls_server, queue_name, url=url) as rig:
        worker = await rig.worker(lease_s=1.0)
        await renewed(worker)
        job = await rig.submit("x", stream=True)
        async with answering(worker):
            assert (await job.result(timeout=5)).text == "x"
        clients = [client for client in rig.admin.client_list() if not client["addr"].startswith("/")]
        assert {client["laddr"].rpartition(":")[2] for client in clients} == {str(tls_port)}


def test_the_blocking_producer_over_tls(tls_server, tls_port, certificates, queue_name) -> None:
    with BlockingProducer(certificates.url(tls_port), queue=queue_name) as producer:
        assert producer.submit("x").id


WRONG = {
    "another authority": ({"ca": "stranger"}, "certificate verify failed"),
    "no client certificate": ({"client": ""}, r"certificate required|closed by server|reset by peer"),
    "a client certificate of a stranger": ({"client": "stranger"}, r"unknown ca|closed by server|reset by peer"),
    "no such file": ({"ca": "nowhere"}, r"nowhere\.pem"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_and_exits_with_3(tls_server, tls_port, certificates, capsys, case) -> None:
    changes, words = WRONG[case]
    url = certificates.url(tls_port, **changes)
    code = main(["check", "--model", str(TINY), "--redis-url", url], {})
    said = capsys.readouterr().err
    assert code == ExitCode.REDIS, said
    assert re.search(words, said, re.IGNORECASE), said
    assert "Traceback" not in said


def test_options_of_tls_without_tls_are_refused(certificates, capsys) -> None:
    url = certificates.url(1, scheme="redis")
    assert main(["check", "--model", str(TINY), "--redis-url", url], {}) == ExitCode.OPERATOR
    assert "ssl_ca_certs is for rediss://" in capsys.readouterr().err


def test_a_client_without_tls_is_told(tls_server, tls_port, capsys) -> None:
    code = main(["check", "--model", str(TINY), "--redis-url", f"redis://127.0.0.1:{tls_port}"], {})
    assert code == ExitCode.REDIS
    assert re.search(r"reset by peer|closed by server", capsys.readouterr().err)


async def test_a_producer_is_told_too(tls_server, tls_port, certificates) -> None:
    async with Producer(certificates.url(tls_port, ca="stranger")) as producer:
        with pytest.raises(QueueUnreachable, match="certificate verify failed"):
            await producer.submit("x")


def test_the_name_in_the_certificate_is_checked(tls_server, tls_port, certificates, capsys) -> None:
    url = certificates.url(tls_port).replace("127.0.0.1", "127.0.0.2")
    assert main(["check", "--model", str(TINY), "--redis-url", url], {}) == ExitCode.REDIS
