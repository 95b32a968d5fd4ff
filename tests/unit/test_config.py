"""Settings from flags, environment and file: precedence, problems all at once, secrets."""

from __future__ import annotations

import pwd

import pytest

from edgellm_worker.batching import Scheduling
from edgellm_worker.config import Settings, flag_name, load_settings, variable_name
from edgellm_worker.errors import ConfigError
from edgellm_worker.logs import LogFormat

MODEL = {"model": "/models/tiny"}


def problems(flags: dict, environment: dict | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, environment or {})
    return caught.value.problems


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "worker.toml"
    file.write_text('queue = "from-file"\nmax-batch-size = 2\nmax_input_len = 100\nscheduling = "static"\n')
    environment = {"EDGELLM_MAX_BATCH_SIZE": "3", "EDGELLM_MAX_INPUT_LEN": "200"}
    settings, _ = load_settings({**MODEL, "config": str(file), "max_input_len": "300"}, environment)
    assert (settings.queue, settings.max_batch_size, settings.max_input_len) == ("from-file", 3, 300)
    assert settings.scheduling is Scheduling.STATIC
    assert settings.lease_s == 30.0


def test_the_file_may_be_named_by_the_environment(tmp_path):
    file = tmp_path / "worker.toml"
    file.write_text('model = "/models/x"\n[speculative-config]\nmethod = "mtp"\nnum_speculative_tokens = 5\n')
    settings, _ = load_settings({}, {"EDGELLM_CONFIG": str(file)})
    assert settings.names == ("x",)
    assert settings.speculative_config is not None
    assert settings.speculative_config.num_speculative_tokens == 5


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
def test_every_setting_has_a_flag_a_variable_and_a_key(field, tmp_path):
    """One value per setting, given by variable and by key, is the same setting."""
    values = {
        "model": "/models/a",
        "served_model_name": "a,b",
        "engine": "reference",
        "engine_home": "thread",
        "cache_dir": "/cache",
        "speculative_config": '{"method":"mtp","num_speculative_tokens":5}',
        "scheduling": "static",
        "redis_url": "redis://elsewhere",
        "redis_password": "hush",
        "redis_password_file": "/run/secret",
        "embedded_dir": "/data",
        "queue": "q",
        "metrics_host": "127.0.0.1",
        "log_format": "json",
        "rewrite_mtp": "bf16",
        "max_kv_cache_capacity": "4096",
        "quantization": "fp8,nvfp4",
        "kv_cache_dtype": "fp8",
    }
    info = Settings.model_fields[field]
    value = values.get(field, str(not info.default).lower() if info.annotation is bool else "7")
    file = tmp_path / "worker.toml"
    file.write_text(f"{field.replace('_', '-')} = '''{value}'''\n")
    by_variable, warnings = load_settings({}, {variable_name(field): value}, require_model=False)
    by_key, _ = load_settings({"config": str(file)}, {}, require_model=False)
    assert by_variable == by_key
    assert not warnings
    assert getattr(by_variable, field) != info.default or field == "engine"
    assert flag_name(field).startswith("--")


def test_all_problems_are_reported_together_under_the_names_they_were_given_by(tmp_path):
    file = tmp_path / "worker.toml"
    file.write_text('max-batchsize = 4\nlease-s = 0\nscheduling = "sometimes"\n')
    found = problems({"config": str(file), "max_batch_size": "0"}, {"EDGELLM_METRICS_PORT": "70000"})
    text = "\n".join(found)
    assert f"{file}: unknown key max-batchsize (did you mean max-batch-size?)" in found
    assert "--max-batch-size: Input should be greater than or equal to 1" in found
    assert "EDGELLM_METRICS_PORT: Input should be less than or equal to 65535" in found
    assert f"{file}: lease-s" in text
    assert f"{file}: scheduling" in text
    assert "--model (or EDGELLM_MODEL) is required" in found
    assert len(found) == 6


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("queue = ")
    assert "broken.toml" in problems({**MODEL, "config": str(file)})[0]
    assert "missing.toml" in problems({**MODEL, "config": str(tmp_path / "missing.toml")})[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"method":"mtp","num_speculative_tokens":3,"depth":2}', "unknown key 'depth'"),
        ('{"method":"mtp"', "delimiter"),
        ("[3]", "dictionary"),
    ],
)
def test_speculative_config_is_checked_with_the_rest(value, words):
    assert words in problems({**MODEL, "speculative_config": value})[0]


def test_limits_that_contradict_each_other_are_a_problem():
    assert "max-input-len 64" in problems({**MODEL, "max_input_len": "64", "max_kv_cache_capacity": "64"})[0]
    given = {"speculative_config": '{"num_speculative_tokens":5}', "max_verify_tree_size": "4"}
    assert problems({**MODEL, **given}) == ("max-verify-tree-size 4 is below num_speculative_tokens + 1, 6",)


def test_all_contradictions_are_told_at_once_each_with_both_fields():
    given = {
        "speculative_config": '{"num_speculative_tokens":5}',
        "max_draft_tree_size": "4",
        "max_verify_tree_size": "4",
        "max_input_len": "60",
        "max_kv_cache_capacity": "64",
        "quantization": "float16,fp8",
        "redis_password": "hush",
        "redis_password_file": "/run/secret",
    }
    assert problems({**MODEL, **given}) == (
        "max-draft-tree-size 4 is below num_speculative_tokens, 5",
        "max-verify-tree-size 4 is below num_speculative_tokens + 1, 6",
        "max-verify-tree-size 4 is below max-draft-tree-size + 1, 5",
        "max-input-len 60 and 5 drafts leave no room in max-kv-cache-capacity 64",
        "quantization: float16 decodes all weights, so that none runs as fp8 or nvfp4",
        "redis-password and redis-password-file are both given",
    )


def test_a_limit_that_is_wrong_by_itself_does_not_hide_how_others_contradict_each_other():
    """And is in no contradiction: nobody knows what was meant."""
    given = {"max_batch_size": "0", "max_verify_tree_size": "2", "max_draft_tree_size": "2", "max_input_len": "5000"}
    assert problems({**MODEL, **given, "max_kv_cache_capacity": "-1"}) == (
        "--max-batch-size: Input should be greater than or equal to 1",
        "--max-kv-cache-capacity: Input should be greater than or equal to 2",
        "max-verify-tree-size 2 is below max-draft-tree-size + 1, 3",
    )


def test_a_form_of_weights_that_does_not_exist_is_a_problem():
    assert "'fp8', 'nvfp4' or 'float16'" in problems({**MODEL, "quantization": "int4"})[0]


def test_variables_that_set_nothing_are_told_of():
    _, warnings = load_settings(MODEL, {"EDGELLM_MAX_BATCHSIZE": "8", "EDGELLM_PLUGIN_PATH": "/x", "HOME": "/"})
    assert warnings == [
        "EDGELLM_MAX_BATCHSIZE is not a setting (did you mean max-batch-size?)",
        "EDGELLM_PLUGIN_PATH is not a setting",
    ]


def test_an_empty_variable_is_an_unset_one():
    settings, _ = load_settings(MODEL, {"EDGELLM_QUEUE": ""})
    assert settings.queue == "default"


class TestSecrets:
    def test_the_password_comes_from_the_file(self, tmp_path):
        secret = tmp_path / "password"
        secret.write_text("hush\n")
        settings, _ = load_settings({**MODEL, "redis_password_file": str(secret)}, {})
        assert settings.password() == "hush"

    def test_the_password_comes_from_the_environment(self):
        settings, _ = load_settings(MODEL, {"EDGELLM_REDIS_PASSWORD": "hush"})
        assert settings.password() == "hush"
        assert load_settings(MODEL, {})[0].password() is None

    def test_no_secret_is_in_what_is_printed(self):
        settings, _ = load_settings({**MODEL, "redis_url": "redis://:hush@host"}, {"EDGELLM_REDIS_PASSWORD": "hush"})
        assert "hush" not in repr(settings)
        assert "hush" not in str(settings.model_dump())

    def test_an_unreadable_file_is_the_operators_mistake(self, tmp_path):
        settings, _ = load_settings({**MODEL, "redis_password_file": str(tmp_path / "none")}, {})
        with pytest.raises(ConfigError, match="redis-password-file"):
            settings.password()

    def test_two_passwords_are_one_too_many(self):
        found = problems({**MODEL, "redis_password_file": "/x"}, {"EDGELLM_REDIS_PASSWORD": "hush"})
        assert "both given" in found[0]


def test_names_and_read_size():
    settings, _ = load_settings({"model": "/models/tiny", "max_queue_batch_size": "9", "max_batch_size": "4"}, {})
    assert settings.names == ("tiny",)
    assert settings.read_size == 4
    named, _ = load_settings({**MODEL, "served_model_name": "a, b", "max_queue_batch_size": "2"}, {})
    assert named.names == ("a", "b")
    assert named.read_size == 2
    assert settings.log_format is LogFormat.TEXT


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("field", ["lease_s", "grace_s", "batch_timeout_ms", "watchdog_s"])
def test_times_are_finite(field, value):
    assert flag_name(field) in problems({**MODEL, field: value})[0]


def test_an_engine_that_there_is_not_names_those_there_are():
    (problem,) = problems(MODEL, {"EDGELLM_ENGINE": "warp"})
    assert problem == "EDGELLM_ENGINE: there is no 'warp'; there are edgellm, reference, tensorrt"


def test_a_server_of_its_own_and_another_are_one_too_many():
    assert "--embedded and --redis-url" in problems({**MODEL, "embedded": True, "redis_url": "redis://elsewhere"})[0]
    settings, _ = load_settings({**MODEL, "embedded": True}, {"EDGELLM_REDIS_URL": "redis://of-the-shell"})
    assert settings.embedded


def test_a_model_that_is_no_folder_is_said_before_anything_is_opened(tmp_path):
    settings, _ = load_settings({"model": str(tmp_path / "nothing")}, {})
    with pytest.raises(ConfigError, match="nothing: no such checkpoint folder"):
        _ = settings.model_dir


def test_a_user_without_a_home_must_name_a_cache(monkeypatch):
    def of_nobody(_: int) -> object:
        raise KeyError

    settings, _ = load_settings(MODEL, {})
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", of_nobody)
    with pytest.raises(ConfigError, match=r"--cache-dir: .* no such home directory"):
        _ = settings.bundles_dir


@pytest.mark.parametrize("field", ["model", "cache_dir", "redis_password_file", "embedded_dir"])
def test_a_path_may_begin_at_a_home(field, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of-the-test")
    settings, _ = load_settings({**MODEL, field: "~/x"}, {})
    assert str(getattr(settings, field)) == "/home/of-the-test/x"
    assert problems({**MODEL, field: "~nobody-here/x"}) == (
        f"{flag_name(field)}: ~nobody-here/x: there is no such home directory",
    )


def test_a_file_in_no_home_is_a_problem():
    assert problems({**MODEL, "config": "~nobody-here/x"}) == (
        "--config: ~nobody-here/x: there is no such home directory",
    )
