"""The configuration: one model, four sources, one list of problems.

    flag  >  EDGELLM_* variable  >  --config FILE (TOML)  >  default

A field `max_batch_size` is the flag `--max-batch-size`, the variable `EDGELLM_MAX_BATCH_SIZE` and the key
`max-batch-size` (or `max_batch_size`) of the file. Every source is read before anything is said, and all problems are
reported together, each under the name by which the value was given. Secrets have no flag: a flag can be seen in `ps`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from edgellm_producer.keys import NAME_PATTERN
from edgellm_producer.shell import expanded, explained
from edgellm_producer.topology import Target
from edgellm_worker.batching import FormerConfig, Scheduling
from edgellm_worker.engine.demands import KvCacheDtype, WeightForm, tree_problems
from edgellm_worker.engine.load import KINDS
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.errors import ConfigError
from edgellm_worker.logs import LogFormat

ENVIRONMENT_PREFIX: Final = "EDGELLM_"
CONFIG_FIELD: Final = "config"


class EngineHome(StrEnum):
    """Where the engine runs."""

    CHILD = "child"
    THREAD = "thread"


def _split_names(value: object) -> object:
    return [name for name in value.replace(",", " ").split() if name] if isinstance(value, str) else value


def _speculative(value: object) -> object:
    given = json.loads(value) if isinstance(value, str) else value
    return SpeculativeConfig.read(given) if isinstance(given, dict) else given


def _at_home(path: Path) -> Path:
    try:
        return expanded(path)
    except OSError as error:
        raise ValueError(explained(error)) from error


def _option(group: str, text: str, *, default: Any, metavar: str = "N", **bounds: Any) -> Any:
    return Field(default=default, description=text, json_schema_extra={"group": group, "metavar": metavar}, **bounds)


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]
WeightForms = Annotated[frozenset[WeightForm], BeforeValidator(_split_names)]
HomePath = Annotated[Path, AfterValidator(_at_home)]
Drafting = Annotated[SpeculativeConfig, BeforeValidator(_speculative)]

_MODEL: Final = "model"
_ENGINE: Final = "engine limits"
_BATCHING: Final = "batching"
_REDIS: Final = "redis"
_OPERATION: Final = "operation"


class Settings(BaseModel):
    """What `serve` and `check` need. Units are in the names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: HomePath | None = _option(_MODEL, "checkpoint folder", default=None, metavar="DIR")
    served_model_name: Names = _option(
        _MODEL, "names that jobs may ask for; default: the folder's name", default=(), metavar="NAME[,NAME]"
    )
    engine: str = _option(_MODEL, "how the model is run", default="reference", metavar="NAME")
    engine_home: EngineHome = _option(
        _MODEL,
        "child: a process of its own, watched; thread: inside the worker",
        default=EngineHome.CHILD,
        metavar="KIND",
    )
    watchdog_s: float = _option(_MODEL, "longest engine step before it counts as hung (child only)", default=30.0, gt=0)
    load_timeout_s: float = _option(
        _MODEL, "longest start of the engine, a build included (child only)", default=1800.0, gt=0
    )
    engine_rss_limit_gib: float | None = _option(
        _MODEL, "replace the engine process between batches above this memory", default=None, gt=0
    )
    cache_dir: HomePath = _option(
        _MODEL, "where built bundles are kept", default=Path("~/.cache/edgellm-worker"), metavar="DIR"
    )
    rewrite_mtp: Literal["bf16"] | None = _option(
        _MODEL,
        "edgellm: build from a copy of the checkpoint whose draft is unquantized; default: from the checkpoint itself",
        default=None,
        metavar="bf16",
    )
    correct_draft_feedback: bool = _option(
        _MODEL, "edgellm: correct the hidden state that the vendor's builder hands from draft to draft", default=True
    )
    accept_fp16_kv: bool = _option(
        _MODEL, "edgellm: take an FP16 KV cache where the vendor does not follow the checkpoint's FP8", default=False
    )
    quantization: WeightForms = _option(
        _MODEL,
        "forms in which the checkpoint's weights must run: fp8, nvfp4, or float16 (decode them); "
        "default: as they are stored where GPU and library can, else float16",
        default=frozenset(),
        metavar="FORM[,FORM]",
    )
    kv_cache_dtype: KvCacheDtype = _option(
        _MODEL, "fp8 or float16; auto: as the checkpoint says", default=KvCacheDtype.AUTO, metavar="TYPE"
    )
    speculative_config: Drafting | None = _option(
        _MODEL,
        'draft settings, e.g. {"method":"mtp","num_speculative_tokens":3}; default: what the checkpoint has',
        default=None,
        metavar="JSON",
    )

    max_batch_size: int = _option(_ENGINE, "rows that run at once", default=4, ge=1, le=256)
    max_input_len: int = _option(_ENGINE, "longest prompt in tokens", default=1024, ge=1)
    max_kv_cache_capacity: int = _option(_ENGINE, "tokens per row, prompt and output together", default=2048, ge=2)
    max_verify_tree_size: int | None = _option(
        _ENGINE, "tokens per verify pass; default: drafts + 1", default=None, ge=1
    )
    max_draft_tree_size: int | None = _option(_ENGINE, "tokens per draft pass; default: drafts", default=None, ge=0)

    batch_timeout_ms: float = _option(
        _BATCHING, "linger: how long an idle engine waits for company, from the oldest job's submit", default=5.0, ge=0
    )
    max_queue_batch_size: int | None = _option(
        _BATCHING, "most jobs per read from the queue; default: max-batch-size", default=None, ge=1
    )
    scheduling: Scheduling = _option(
        _BATCHING, "jobs join running batches, or read-run-reply", default=Scheduling.IN_FLIGHT, metavar="KIND"
    )
    ageing_s: float = _option(
        _BATCHING, "a job older than this counts one lane higher and is not overtaken", default=30.0, ge=0
    )

    redis_url: SecretStr = _option(
        _REDIS,
        "redis://, rediss://, unix://, redis+sentinel://, redis+cluster://",
        default=SecretStr("redis://127.0.0.1:6379"),
        metavar="URL",
    )
    redis_password: SecretStr | None = _option(_REDIS, "password (no flag: see redis-password-file)", default=None)
    redis_password_file: HomePath | None = _option(_REDIS, "file that holds the password", default=None, metavar="FILE")
    embedded: bool = _option(_REDIS, "start a server of its own instead of connecting to one", default=False)
    embedded_dir: HomePath | None = _option(
        _REDIS, "where the embedded server keeps its data; default: a temporary folder", default=None, metavar="DIR"
    )
    queue: str = _option(_REDIS, "queue name", default="default", metavar="NAME", pattern=NAME_PATTERN)
    block_ms: float = _option(_REDIS, "longest blocking read", default=1000.0, ge=1, le=60_000)
    lease_s: float = _option(_REDIS, "how long a silent worker keeps its jobs", default=30.0, ge=0.2)
    sweep_s: float = _option(_REDIS, "how often delayed, expired and abandoned jobs are looked for", default=1.0, gt=0)

    grace_s: float = _option(_OPERATION, "after SIGTERM: how long running jobs may finish", default=30.0, ge=0)
    metrics_host: str = _option(_OPERATION, "address of the metrics port", default="0.0.0.0", metavar="HOST")  # noqa: S104
    metrics_port: int = _option(
        _OPERATION, "port of /metrics and /health; 0 takes a free one", default=9108, ge=0, le=65535
    )
    log_format: LogFormat = _option(
        _OPERATION, "log lines for people or for machines", default=LogFormat.TEXT, metavar="KIND"
    )

    @field_validator("engine")
    @classmethod
    def _of_a_known_engine(cls, value: str) -> str:
        if value not in KINDS:
            raise ValueError(f"there is no {value!r}; there are {', '.join(sorted(KINDS))}")
        return value

    @field_validator("redis_url")
    @classmethod
    def _of_a_known_kind(cls, value: SecretStr) -> SecretStr:
        Target.parse(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        num_drafts = None if self.speculative_config is None else self.speculative_config.num_speculative_tokens
        problems = tree_problems(num_drafts, self.max_verify_tree_size, self.max_draft_tree_size)
        if self.max_input_len + (num_drafts or 0) >= self.max_kv_cache_capacity:
            drafts = f" and {num_drafts} drafts leave" if num_drafts else " leaves"
            problems.append(
                f"max-input-len {self.max_input_len}{drafts} no room in max-kv-cache-capacity "
                f"{self.max_kv_cache_capacity}"
            )
        if WeightForm.FLOAT16 in self.quantization and len(self.quantization) > 1:
            problems.append("quantization: float16 decodes all weights, so that none runs as fp8 or nvfp4")
        if self.redis_password is not None and self.redis_password_file is not None:
            problems.append("redis-password and redis-password-file are both given")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def model_dir(self) -> Path:
        """Raises `ConfigError` when no model was given, or what was given is no folder."""
        if self.model is None:
            raise ConfigError([f"--model (or {variable_name('model')}) is required"])
        if not self.model.is_dir():
            raise ConfigError([f"{self.model}: no such checkpoint folder (a folder here; nothing is downloaded)"])
        return self.model

    @property
    def bundles_dir(self) -> Path:
        """`cache_dir`, whose default is in a home as well. Raises `ConfigError` where there is none."""
        try:
            return expanded(self.cache_dir)
        except OSError as error:
            raise ConfigError([f"--cache-dir: {explained(error)}"]) from error

    @property
    def names(self) -> tuple[str, ...]:
        if self.served_model_name or self.model is None:
            return self.served_model_name
        return (self.model.resolve().name,)

    @property
    def read_size(self) -> int:
        return min(self.max_queue_batch_size or self.max_batch_size, self.max_batch_size)

    def former(self) -> FormerConfig:
        return FormerConfig(self.batch_timeout_ms / 1e3, self.ageing_s, self.scheduling)

    def password(self) -> str | None:
        """The secret itself. Raises `ConfigError` when its file cannot be read."""
        if self.redis_password_file is not None:
            try:
                return self.redis_password_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError([f"redis-password-file: {explained(error)}"]) from error
        return self.redis_password.get_secret_value() if self.redis_password is not None else None


SECRETS: Final = frozenset({"redis_password"})


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    return ENVIRONMENT_PREFIX + field.upper()


def option_extra(field: FieldInfo) -> dict[str, str]:
    """`group` and `metavar` of a field, for --help."""
    extra = field.json_schema_extra
    return {key: str(value) for key, value in extra.items()} if isinstance(extra, dict) else {}


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], *, require_model: bool = True
) -> tuple[Settings, list[str]]:
    """The settings and warnings about variables that mean nothing; `ConfigError` lists every problem.

    `flags` holds only those given, under their field names, and `config` for --config.
    """
    problems: list[str] = []
    file = flags.get(CONFIG_FIELD) or environment.get(variable_name(CONFIG_FIELD))
    from_file = _read_file(Path(file), problems) if file else {}
    from_environment = {
        field: environment[variable_name(field)]
        for field in Settings.model_fields
        if environment.get(variable_name(field), "") != ""
    }
    from_flags = {field: value for field, value in flags.items() if field != CONFIG_FIELD}
    merged = {**from_file, **from_environment, **from_flags}

    def spelled(field: str) -> str:
        if field in from_flags:
            return flag_name(field)
        return variable_name(field) if field in from_environment else f"{file}: {field.replace('_', '-')}"

    settings = _validated(merged, spelled, problems)
    if from_flags.get("embedded") and "redis_url" in from_flags:
        problems.append("--embedded and --redis-url are both given: a server of its own, or that one?")
    if require_model and "model" not in merged:
        problems.append(f"--model (or {variable_name('model')}) is required")
    if problems or settings is None:
        raise ConfigError(problems)
    return settings, _unknown_variables(environment)


def _validated(merged: dict[str, Any], spelled: Callable[[str], str], problems: list[str]) -> Settings | None:
    wrong: set[str] = set()
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            message = problem["msg"].removeprefix("Value error, ")
            if problem["loc"]:
                wrong.add(str(problem["loc"][0]))
                problems.append(f"{spelled(str(problem['loc'][0]))}: {message}")
            else:
                problems += message.splitlines()  # contradictions between fields, one a line
    if wrong:
        problems += _contradictions_beside(wrong, merged, spelled)
    return None


def _contradictions_beside(wrong: set[str], merged: dict[str, Any], spelled: Callable[[str], str]) -> list[str]:
    """Between the fields that are right by themselves: they are compared only where all fields are."""
    others: list[str] = []
    _validated({field: value for field, value in merged.items() if field not in wrong}, spelled, others)
    names = [field.replace("_", "-") for field in wrong]
    return [line for line in others if not any(name in line for name in names)]


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    """Keys with underscores; what cannot be used is a problem."""
    try:
        raw = tomllib.loads(expanded(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"--config: {explained(error)}" if isinstance(error, OSError) else f"--config {path}: {error}")
        return {}
    known: dict[str, Any] = {}
    for key, value in raw.items():
        field = key.replace("-", "_")
        if field in Settings.model_fields:
            known[field] = value
        else:
            problems.append(f"{path}: unknown key {key}{_suggestion(field)}")
    return known


def _suggestion(field: str) -> str:
    close = get_close_matches(field, Settings.model_fields, 1)
    return f" (did you mean {close[0].replace('_', '-')}?)" if close else ""


def _unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like ours and set nothing: perhaps another program's, perhaps a slip."""
    known = {variable_name(field) for field in (*Settings.model_fields, CONFIG_FIELD)}
    return sorted(
        f"{name} is not a setting{_suggestion(name.removeprefix(ENVIRONMENT_PREFIX).lower())}"
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known
    )
