"""The composition root: opens everything `serve` needs in order, and closes it in the reverse order.

    open    metrics port, (embedded server), tokenizer, queue, engine; then the daemon runs
    close   engine, queue, (embedded server), metrics port

Cheap things that can be wrong come before expensive ones, and nothing reads a job before everything stands: a worker
that cannot start leaves the queue as it was. The port opens first, so that /health says "loading" from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import platform
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Final

import structlog

from edgellm_worker.config import Settings
from edgellm_worker.daemon import Daemon, DaemonConfig, DaemonParts
from edgellm_worker.embedded import EmbeddedServer, EmbeddedServerError
from edgellm_worker.engine.api import (
    EngineFailure,
    EngineHandle,
    EngineLimits,
    GenerationRequest,
    StepReport,
)
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engines import open_engine, requested_limits
from edgellm_worker.errors import ConfigError, ExitCode
from edgellm_worker.health import HealthSnapshot, WorkerState, state_of
from edgellm_worker.jobs import ServedModel
from edgellm_worker.metrics import Metrics, MetricsShape
from edgellm_worker.metrics.server import MetricsServer
from edgellm_worker.queue.config import QueueConfig, new_consumer_name
from edgellm_worker.queue.redis_queue import RedisQueue
from edgellm_worker.sampling_defaults import SamplingDefaults
from edgellm_worker.sdnotify import Notifier
from edgellm_worker.statusline import StatusLine
from edgellm_worker.telemetry import Telemetry
from edgellm_worker.tokenizer import Tokenizer
from edgellm_worker.tracing import Tracer, tracer_of

TELEMETRY_INTERVAL_S: Final = 5.0
CANARY_PROMPT: Final = "def add(a, b):\n"
CANARY_TOKENS: Final = 16
_SIGNALS: Final = {
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGHUP: ExitCode.HUNG_UP,
}


class Face:
    """What the metrics port shows: a worker that loads, then the daemon's own numbers. Read by other threads."""

    def __init__(self, settings: Settings) -> None:
        self._metrics = Metrics(_shape(settings, requested_limits(settings), "loading"))
        self._daemon: Daemon | None = None
        self._metrics.health(self.snapshot(), redis_up=False)

    def render(self) -> bytes:
        return self._daemon.render() if self._daemon is not None else self._metrics.render()

    def snapshot(self) -> HealthSnapshot:
        return self._daemon.snapshot() if self._daemon is not None else HealthSnapshot(WorkerState.LOADING)

    def ready(self, daemon: Daemon) -> None:
        self._daemon = daemon


def _shape(settings: Settings, limits: EngineLimits, method: str) -> MetricsShape:
    names = ",".join(settings.names)
    return MetricsShape(
        max_batch_size=limits.max_batch_size,
        num_speculative_tokens=limits.num_speculative_tokens,
        kv_cache_tokens=limits.max_batch_size * limits.max_kv_cache_capacity,
        build=(version("edgellm-worker"), platform.python_version(), settings.engine, names, method),
        cache_config=(
            str(limits.max_batch_size),
            str(limits.max_input_len),
            str(limits.max_kv_cache_capacity),
            str(limits.num_speculative_tokens),
            str(settings.scheduling),
        ),
    )


@contextmanager
def redis_url(settings: Settings) -> Iterator[str]:
    """The URL to connect to; an embedded server lives as long as the context."""
    if not settings.embedded:
        yield settings.redis_url.get_secret_value()
        return
    try:
        with EmbeddedServer(settings.embedded_dir) as server:
            yield server.url
    except (EmbeddedServerError, ImportError) as error:
        raise ConfigError([f"--embedded: {error}"]) from error


def served_model(settings: Settings, worker: str) -> ServedModel:
    """Raises `CheckpointError` naming the file that cannot be used."""
    tokenizer = Tokenizer(settings.model_dir)
    return ServedModel(settings.names, tokenizer, SamplingDefaults.read(tokenizer.generation_config), worker)


def queue_config(settings: Settings, url: str) -> QueueConfig:
    return QueueConfig(
        url=url,
        password=settings.password(),
        queue=settings.queue,
        consumer=new_consumer_name(),
        served_models=settings.names,
        lease_s=settings.lease_s,
        block_ms=round(settings.block_ms),
        ageing_s=settings.ageing_s,
    )


def daemon_config(settings: Settings) -> DaemonConfig:
    return DaemonConfig(
        former=settings.former(),
        read_size=settings.read_size,
        block_s=settings.block_ms / 1e3,
        sweep_s=settings.sweep_s,
        grace_s=settings.grace_s,
    )


class Assembly:
    """Everything open, ready to run."""

    def __init__(self, queue: RedisQueue, engine: EngineHandle, model: ServedModel, metrics: Metrics) -> None:
        self.queue = queue
        self.engine = engine
        self.model = model
        self.metrics = metrics


@asynccontextmanager
async def assembled(settings: Settings, url: str) -> AsyncIterator[Assembly]:
    """Queue and engine, opened; closed engine first, so that no row outlives its lease."""
    config = queue_config(settings, url)
    model = served_model(settings, config.consumer)
    async with AsyncExitStack() as stack:
        queue = RedisQueue(config)
        stack.push_async_callback(_close_queue, queue)
        await queue.open()
        engine = await open_engine(settings)
        stack.push_async_callback(engine.close)
        yield Assembly(queue, engine, model, Metrics(_shape(settings, engine.limits, engine.traits.speculative_method)))


async def _close_queue(queue: RedisQueue) -> None:
    """The server may be gone by now: nothing is left to lose."""
    with contextlib.suppress(OSError):
        await queue.close()


class Stop:
    """Signals, turned into a drain once there is a daemon, and into the end of loading before."""

    def __init__(self) -> None:
        self.code = ExitCode.DONE
        self._daemon: Daemon | None = None
        self._task = asyncio.current_task()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                loop.add_signal_handler(number, self.request, number)

    def request(self, number: signal.Signals) -> None:
        self.code = _SIGNALS[number]
        if self._daemon is not None:
            self._daemon.stop()
        elif self._task is not None:
            self._task.cancel()

    def guard(self, daemon: Daemon) -> None:
        """From here on a signal drains this daemon."""
        self._daemon = daemon


async def serve(settings: Settings, environment: Mapping[str, str]) -> ExitCode:
    """Run the worker until a signal; returns the exit code of a clean end."""
    stop = Stop()
    stop.install()
    face = Face(settings)
    log = structlog.get_logger("edgellm_worker.app")
    with _metrics_server(settings, face) as port, redis_url(settings) as url:
        log.info("loading", model=str(settings.model), engine=settings.engine, metrics=port.url)
        status = StatusLine(face.snapshot, time.monotonic)
        try:
            async with status.shown(), assembled(settings, url) as parts:
                with _tracer(settings, environment, parts.model.worker) as tracer:
                    daemon = Daemon(
                        DaemonParts(parts.queue, parts.engine, parts.model, parts.metrics, time.monotonic, tracer),
                        daemon_config(settings),
                    )
                    face.ready(daemon)
                    status.metrics = parts.metrics
                    stop.guard(daemon)
                    log.info("ready", worker=parts.model.worker, queue=settings.queue, redis=_shown(url))
                    with _seldom_collected():
                        await _run_beside_house(daemon, parts.metrics, Notifier(environment))
        except asyncio.CancelledError:
            if stop.code is ExitCode.DONE:
                raise
        log.info("stopped")
    return stop.code


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Jobs leave no cycles: what they made goes with its last reference. So cycles are looked for a tenth as often, and
    not in what has stood since the start.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _tracer(settings: Settings, environment: Mapping[str, str], worker: str) -> Iterator[Tracer]:
    try:
        tracer = tracer_of(environment, queue=settings.queue, worker=worker)
    except ImportError as error:
        raise ConfigError([f"OTEL_* variables ask for traces: {error}; install edgellm-worker[tracing]"]) from error
    try:
        yield tracer
    finally:
        tracer.close()


def _shown(url: str) -> str:
    """The URL without what may be a password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _metrics_server(settings: Settings, face: Face) -> MetricsServer:
    try:
        return MetricsServer(face.render, face.snapshot, host=settings.metrics_host, port=settings.metrics_port)
    except OSError as error:
        where = f"--metrics-host {settings.metrics_host} --metrics-port {settings.metrics_port}"
        raise ConfigError([f"{where}: {error.strerror}"]) from error


async def _run_beside_house(daemon: Daemon, metrics: Metrics, notifier: Notifier) -> None:
    """The daemon, with what the machine says of itself and systemd's watchdog beside it."""
    house = [
        asyncio.create_task(_watch_device(metrics), name="telemetry"),
        asyncio.create_task(_notify(daemon, notifier), name="systemd"),
    ]
    notifier.ready("serving")
    try:
        await daemon.run()
    finally:
        for task in house:
            task.cancel()
        await asyncio.gather(*house, return_exceptions=True)
        notifier.stopping("closing")  # an idle worker's drain is over before the watchdog's next turn


async def _watch_device(metrics: Metrics) -> None:
    telemetry = await asyncio.to_thread(Telemetry.of_this_machine)
    while True:
        metrics.device(await asyncio.to_thread(telemetry.read, time.monotonic()))
        await asyncio.sleep(TELEMETRY_INTERVAL_S)


async def _notify(daemon: Daemon, notifier: Notifier) -> None:
    """Signs of life only while there is progress: a hung engine lets systemd's watchdog act."""
    interval_s = notifier.watchdog_interval_s or 1.0
    was_draining = False
    while True:
        snapshot = daemon.snapshot()
        if daemon.is_draining and not was_draining:
            was_draining = True
            notifier.stopping()
        if state_of(snapshot) is not WorkerState.HUNG:
            notifier.alive()
        await asyncio.sleep(interval_s)


async def check(settings: Settings) -> list[str]:
    """What `serve` would do before its first job, and one prompt through the engine; a line per thing that was tried.

    Raises what `serve` would raise. Nothing is read from the queue.
    """
    lines = [f"settings  {', '.join(settings.names)} on queue {settings.queue}, engine {settings.engine}"]
    with redis_url(settings) as url:
        async with assembled(settings, url) as parts:
            stats = await parts.queue.stats()
            limits = parts.engine.limits
            lines += [
                f"redis     {_shown(url)} answers; {sum(stats.length.values())} jobs in the lanes, {stats.dead} dead",
                (
                    f"engine    {parts.engine.traits.name}: drafting {parts.engine.traits.speculative_method}, "
                    f"{limits.max_batch_size} rows of {limits.max_kv_cache_capacity} tokens"
                ),
                await _canary(parts.engine, parts.model),
            ]
    return lines


async def _canary(engine: EngineHandle, model: ServedModel) -> str:
    """Run a short greedy prompt; `EngineError` when the engine does not come back with tokens."""
    limits = engine.limits
    prompt = model.tokenizer.encode(CANARY_PROMPT)[: limits.max_input_len]
    length = min(CANARY_TOKENS, limits.max_new_tokens(len(prompt)))
    request = GenerationRequest(prompt, length, eos_token_ids=model.tokenizer.eos_token_ids)
    engine.validate(request)
    engine.add(0, request)
    tokens: list[int] = []
    num_drafted = num_accepted = 0
    while True:
        event = await engine.next_event()
        if isinstance(event, EngineFailure):
            raise EngineError(f"canary: {event.reason}")
        for update in event.updates if isinstance(event, StepReport) else ():
            tokens.extend(update.token_ids)
            num_drafted, num_accepted = num_drafted + update.num_drafted, num_accepted + update.num_accepted
            if update.error is not None:
                raise EngineError(f"canary: {update.error}")
            if update.finish_reason is not None:
                text = model.tokenizer.decode(tokens)
                return f"canary    {len(tokens)} tokens, {num_accepted} of {num_drafted} drafts accepted: {text!r}"
