"""The protocol from other languages: the examples in shell and JavaScript, against a worker that answers at once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from edgellm_producer import Producer
from edgellm_producer.cli import main as producer_cli
from edgellm_producer.scripts import script
from edgellm_producer.wire import decode_job
from tests.support.instant_worker import echo, instant_worker
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.xdist_group("languages")

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = 'def grüße(n): "\\n"\n\t$HOME'
NPM_TIMEOUT_S = 60
TIMEOUT_S = 60


def needed(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture
def submit_lua(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script's text as any language gets it."""
    assert producer_cli(["script", "submit"]) == 0
    path = tmp_path / "submit.lua"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def node_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needed("node", "npm")
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-audit", "--no-fund", "--fetch-retries=0", "--fetch-timeout=20000"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"no npm registry answered within {NPM_TIMEOUT_S} s")
    if done.returncode:
        code = next((line for line in done.stderr.splitlines() if " code " in line), done.stderr[-300:])
        if any(word in code for word in ("EUSAGE", "EBADENGINE", "EINTEGRITY")):
            pytest.fail(f"package-lock.json does not fit package.json: {code}")
        pytest.skip(f"npm ci failed, no registry: {code}")
    return folder


def environment(server: RedisServer, queue_name: str, submit_lua: Path) -> dict[str, str]:
    return dict(os.environ) | {
        "EDGELLM_REDIS_SOCKET": server.socket_path,
        "EDGELLM_QUEUE": queue_name,
        "SUBMIT_LUA": str(submit_lua),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # a python3 with msgpack
    }


async def run(command: list[str], cwd: Path, env: dict[str, str]) -> tuple[int, str, str]:
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


async def test_shell_submits_and_reads_its_answer(default_server: RedisServer, queue_name: str, submit_lua: Path):
    needed("redis-cli")
    env = environment(default_server, queue_name, submit_lua)
    async with instant_worker(default_server.url, queue_name):
        code, out, err = await run(["bash", str(EXAMPLES / "shell" / "produce.sh"), PROMPT], submit_lua.parent, env)
    assert (code, err) == (0, "")
    assert out == f"ok {PROMPT.upper()}\n"


async def test_shell_says_that_the_queue_is_full(default_server: RedisServer, queue_name: str, submit_lua: Path):
    needed("redis-cli")
    env = environment(default_server, queue_name, submit_lua)
    async with Producer(default_server.url, queue=queue_name) as producer:
        await producer.call("HSET", producer.keys.config, "max_jobs", 0)
    code, out, err = await run(["bash", str(EXAMPLES / "shell" / "produce.sh"), "x"], submit_lua.parent, env)
    assert (code, out, err) == (1, "", "not queued: full\n")


async def test_node_submits_and_streams(
    default_server: RedisServer, queue_name: str, submit_lua: Path, node_example: Path
):
    env = environment(default_server, queue_name, submit_lua)
    async with instant_worker(default_server.url, queue_name):
        code, out, err = await run(["node", "produce.js", PROMPT], node_example, env)
    assert (code, err) == (0, "")
    answer, streamed = out.rsplit("streamed ", 1)
    assert answer == f"ok {PROMPT.upper()}\n"
    assert json.loads(streamed) == PROMPT.upper()


async def test_a_foreign_job_is_the_job_that_python_would_have_sent(
    default_server: RedisServer, queue_name: str, submit_lua: Path, node_example: Path
):
    """What node put into the lane decodes to the same fields, and its status reads as any job's."""
    env = environment(default_server, queue_name, submit_lua)
    seen = []

    def answer(delivery):
        seen.append(delivery.job)
        return echo(delivery)

    async with instant_worker(default_server.url, queue_name, answer):
        code, _, err = await run(["node", "produce.js", PROMPT], node_example, env)
    assert (code, err) == (0, "")
    (job,) = seen
    expected = {"v": 1, "id": job.id, "prompt": PROMPT, "max_tokens": 32, "temperature": 0.0, "stream": True}
    assert job == decode_job(msgpack.packb(expected))
    async with Producer(default_server.url, queue=queue_name) as producer:
        status = await producer.status(job.id)
    assert (status.state, status.status, status.has_reply) == ("done", "ok", True)


def test_script_is_the_text_that_the_client_sends(submit_lua: Path):
    assert submit_lua.read_text(encoding="utf-8") == script("submit").source
