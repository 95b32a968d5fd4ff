"""The gateway, used by the official OpenAI client over real HTTP and a real queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest
import uvicorn

from edgellm_producer import Producer
from edgellm_producer.errors import QueueFull
from edgellm_producer.gateway.access import AccessFileError, ApiKeys, Throughput
from edgellm_producer.gateway.app import Gateway, GatewayOptions
from edgellm_producer.job import JobState
from edgellm_producer.wire import ErrorInfo, Reply, Status
from tests.support.instant_worker import echo, instant_worker
from tests.support.redis_server import free_port

NO_KEYS = ApiKeys({})
KEYS = ApiKeys({"secret-a": "team-a", "secret-b": "team-b"})


@asynccontextmanager
async def gateway(url: str, queue: str, keys: ApiKeys = NO_KEYS) -> AsyncIterator[str]:
    """The base URL of a gateway that runs in this loop."""
    port = free_port()
    async with Producer(url, queue=queue) as producer:
        application = Gateway(producer, GatewayOptions(("tiny",), keys, timeout_s=30)).application()
        server = uvicorn.Server(uvicorn.Config(application, port=port, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.should_exit = True
            await task


def client(base_url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)


@pytest.fixture
async def serving(default_server, queue_name) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        instant_worker(default_server.url, queue_name),
        gateway(default_server.url, queue_name) as url,
        client(url) as api,
    ):
        yield api


MESSAGES = [{"role": "user", "content": "hello"}]


async def test_chat(serving):
    answer = await serving.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
    assert answer.choices[0].message.content == "HELLO"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 3
    assert answer.model == "tiny"


async def test_completion(serving):
    answer = await serving.completions.create(model="tiny", prompt="abc")
    assert answer.choices[0].text == "ABC"


async def test_chat_streams(serving):
    stream = await serving.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "HELLO"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 2


async def test_completion_streams(serving):
    stream = await serving.completions.create(model="tiny", prompt="abcd", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "ABCD"


async def test_models(serving):
    assert [model.id async for model in serving.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 3}, "n"), ({"temperature": -1}, "temperature"), ({"extra_body": {"nonsense": 1}}, "nonsense")],
)
async def test_what_cannot_be_honoured_is_a_bad_request_that_names_it(serving, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await serving.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    assert caught.value.param == param


async def test_a_rejected_job_is_an_error_whole_and_streamed(default_server, queue_name):
    def answer(delivery):
        info = ErrorInfo(code="model_not_found", message="no such model", field="model")
        return Reply(id=delivery.id, status=Status.REJECTED, error=info)

    async with (
        instant_worker(default_server.url, queue_name, answer),
        gateway(default_server.url, queue_name) as url,
        client(url) as api,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await api.chat.completions.create(model="x", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.APIError, match="no such model"):
            async for _ in await api.chat.completions.create(model="x", messages=MESSAGES, stream=True):
                pass


async def test_a_full_queue_is_429_with_retry_after(default_server, queue_name):
    with default_server.client() as redis:
        redis.hset(f"edgellm:{{{queue_name}}}:config", "max_jobs", 1)
    async with gateway(default_server.url, queue_name) as url, client(url) as api:
        async with Producer(default_server.url, queue=queue_name) as producer:
            await producer.submit("fills the queue")
        with pytest.raises(openai.RateLimitError) as caught:
            await api.chat.completions.create(model="tiny", messages=MESSAGES)
        assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_keys_become_tenants_and_strangers_are_refused(default_server, queue_name):
    seen = []

    def answer(delivery):
        seen.append(delivery.job.tenant)
        return echo(delivery)

    async with (
        instant_worker(default_server.url, queue_name, answer),
        gateway(default_server.url, queue_name, KEYS) as url,
    ):
        async with client(url, "secret-b") as api:
            await api.chat.completions.create(model="tiny", messages=MESSAGES)
        async with client(url, "guess") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.chat.completions.create(model="tiny", messages=MESSAGES)
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
    assert seen == ["team-b"]


async def test_an_idempotency_key_belongs_to_its_tenant(default_server, queue_name):
    """The same key and body of the same tenant are one job, of another tenant another."""
    ids = []
    async with (
        instant_worker(default_server.url, queue_name),
        gateway(default_server.url, queue_name, KEYS) as url,
    ):
        for secret in ("secret-a", "secret-a", "secret-b"):
            async with client(url, secret) as api:
                answer = await api.completions.create(
                    model="tiny", prompt="abc", extra_headers={"Idempotency-Key": "k1"}
                )
            ids.append(answer.id)
    assert ids[0] == ids[1] != ids[2]


async def test_who_joined_a_job_by_its_key_does_not_cancel_it(default_server, queue_name):
    body, key = {"model": "tiny", "prompt": "x"}, {"Idempotency-Key": "k1"}
    async with Producer(default_server.url, queue=queue_name) as queue:
        job = await queue.submit("x", model="tiny", timeout_s=30.0, idempotency_key="k1")
        async with gateway(default_server.url, queue_name) as url, httpx2.AsyncClient() as http:
            with pytest.raises(httpx2.ReadTimeout):
                await http.post(f"{url}/completions", json=body, headers=key, timeout=0.5)
        async with instant_worker(default_server.url, queue_name):  # the gateway has seen its client leave by now
            assert (await job.result(timeout=20)).text == "X"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_job(default_server, queue_name, stream):
    """Streamed or whole, and only its own."""
    async with gateway(default_server.url, queue_name) as url, Producer(default_server.url, queue=queue_name) as queue:
        other = await queue.submit("somebody else's")
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
        async with httpx2.AsyncClient() as http:
            asking = asyncio.create_task(_ask(http, f"{url}/chat/completions", body, stream=stream))
            with default_server.client() as redis:
                prefix = f"edgellm:{{{queue_name}}}:job:"
                while not (found := set(redis.keys(prefix + "*")) - {prefix + other.id}):
                    await asyncio.sleep(0.01)
                job_id = found.pop().removeprefix(prefix)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(10):
            while (await queue.status(job_id)).state is not JobState.DONE:
                await asyncio.sleep(0.02)
        assert (await queue.status(job_id)).status is Status.CANCELLED
        assert (await other.status()).state is JobState.QUEUED


async def _ask(http: httpx2.AsyncClient, url: str, body: dict, *, stream: bool) -> None:
    if stream:
        async with http.stream("POST", url, json=body) as response:
            async for _ in response.aiter_bytes():
                pass
    else:
        await http.post(url, json=body, timeout=60)


async def test_broken_and_oversized_bodies(default_server, queue_name):
    async with gateway(default_server.url, queue_name) as url, httpx2.AsyncClient() as http:
        broken = await http.post(f"{url}/chat/completions", content=b"{")
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "malformed")
        large = await http.post(f"{url}/chat/completions", content=b" " * (2 << 20))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
        half = await http.post(f"{url}/completions", content=rb'{"model": "tiny", "prompt": "\ud83d"}')
        assert (half.status_code, half.json()["error"]["param"]) == (400, "prompt")
        field = await http.post(f"{url}/completions", content=rb'{"model": "tiny", "prompt": "x", "\ud83d": 1}')
        assert (field.status_code, field.json()["error"]["code"]) == (400, "unsupported_field")
        for elsewhere in (await http.post(f"{url}/embeddings", json={}), await http.get(f"{url}/completions")):
            assert elsewhere.status_code in {404, 405}
            assert "is not served here" in elsewhere.json()["error"]["message"]


async def test_health_tells_whether_the_queue_answers(start_server, queue_name):
    server = start_server()
    async with gateway(server.url, queue_name) as url, httpx2.AsyncClient() as http:
        health = url.removesuffix("/v1") + "/health"
        assert (await http.get(health)).status_code == 200
        server.kill()
        assert (await http.get(health, timeout=60)).status_code == 503


def test_the_key_file_is_checked_line_by_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# comment\nk1 team-a\n\nk2 team-b # ours\n")
    assert ApiKeys.read(file).tenants == {"k1": "team-a", "k2": "team-b"}
    file.write_text("k1 team-a\nk1 team-b\n")
    with pytest.raises(AccessFileError, match=":2:"):
        ApiKeys.read(file)


def test_retry_after_follows_the_rate_of_answers():
    rate = Throughput()
    full = QueueFull(100, 91)
    assert rate.retry_after_s(full, 0.0) == 1
    for second in range(60):
        rate.answered(float(second))
    assert rate.retry_after_s(full, 59.0) == 10
    assert rate.retry_after_s(full, 1000.0) == 1
