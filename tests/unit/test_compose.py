"""What is deployed: compose, Kubernetes, systemd and Dockerfiles agree with the worker and with each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from edgellm_producer.keys import Keys
from edgellm_worker.config import Settings, variable_name
from edgellm_worker.errors import ExitCode
from grafana.panel import DATASOURCE

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
WORKERS = {name: service for name, service in SERVICES.items() if name.startswith("worker-")}
KUBERNETES = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/edgellm-worker.yaml").read_text(encoding="utf-8")))
UNIT = (ROOT / "deploy/edgellm-worker.service").read_text(encoding="utf-8")
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
METRICS_PORT = Settings.model_fields["metrics_port"].default
GRACE_S = Settings.model_fields["grace_s"].default


def kind(name: str) -> list[dict]:
    return [document for document in KUBERNETES if document["kind"] == name]


def test_compose_file_follows_the_compose_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, ROOT / "docker-compose.yml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_one_worker_per_profile_and_everything_else_always():
    assert {name: service["profiles"] for name, service in WORKERS.items()} == {
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "worker-jetson": ["jetson"],
    }
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        "redis",
        "prometheus",
        "grafana",
    }


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_watched_and_restarted(name: str):
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", WORKERS)
def test_worker_container_is_confined(name: str):
    service = WORKERS[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["stop_grace_period"].removesuffix("s")) > GRACE_S


def test_only_this_machine_reaches_the_published_ports():
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_redis_refuses_rather_than_drops():
    command = SERVICES["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert command[command.index("--appendonly") + 1] == "yes"


def test_prometheus_finds_the_workers_by_their_alias():
    config = yaml.safe_load((ROOT / "grafana/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (discovery,) = config["scrape_configs"][0]["dns_sd_configs"]
    for service in WORKERS.values():
        assert service["networks"]["default"]["aliases"] == discovery["names"]
        assert service["expose"] == [str(discovery["port"])] == [str(METRICS_PORT)]


def test_grafana_loads_what_compose_mounts():
    source = yaml.safe_load((ROOT / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/edgellm.yml").read_text(encoding="utf-8"))
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert source["datasources"][0]["uid"] == DATASOURCE["uid"]
    assert mounts["./grafana/dashboards"] == provider["providers"][0]["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "grafana/dashboards" / Path(home).name).exists()


def test_mounted_folders_exist():
    bound = [v.split(":")[0] for service in SERVICES.values() for v in service.get("volumes", [])]
    assert all((ROOT / path).exists() for path in bound if path.startswith("./"))


def test_grafana_image_is_the_version_whose_schema_is_tested():
    pinned = re.search(r"grafana_foundation_sdk==\d+!(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert pinned is not None
    assert SERVICES["grafana"]["image"] == f"grafana/grafana:{pinned.group(1)}"


@pytest.mark.parametrize("name", WORKERS)
def test_each_worker_has_its_dockerfile(name: str):
    assert (ROOT / WORKERS[name]["build"]["dockerfile"]) in DOCKERFILES


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_ends_as_a_user_without_rights_and_copies_what_the_context_has(path: Path):
    text = path.read_text(encoding="utf-8")
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users[-1] == "10001"
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert set(sources.split()) <= allowed
        assert all((ROOT / source).exists() for source in sources.split())


def test_kubernetes_probes_and_grace():
    (deployment,) = kind("Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > GRACE_S
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["ports"] == [{"name": "metrics", "containerPort": METRICS_PORT}]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_keda_watches_the_lanes_of_the_deployments_queue():
    (deployment,) = kind("Deployment")
    (scaled,) = kind("ScaledObject")
    env = {e["name"]: e.get("value") for e in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    streams = [trigger["metadata"]["stream"] for trigger in scaled["spec"]["triggers"]]
    assert streams == list(Keys(env["EDGELLM_QUEUE"]).lanes)
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    names = {document["metadata"]["name"] for document in kind("TriggerAuthentication")}
    assert {trigger["authenticationRef"]["name"] for trigger in scaled["spec"]["triggers"]} <= names


def test_secrets_that_are_referred_to_are_there():
    secrets = {secret["metadata"]["name"]: secret["stringData"].keys() for secret in kind("Secret")}
    for authentication in kind("TriggerAuthentication"):
        for ref in authentication["spec"]["secretTargetRef"]:
            assert ref["key"] in secrets[ref["name"]]
    (deployment,) = kind("Deployment")
    for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "valueFrom" in variable:
            ref = variable["valueFrom"]["secretKeyRef"]
            assert ref["key"] in secrets[ref["name"]]


def test_secrets_are_not_on_any_command_line():
    text = json.dumps([COMPOSE, KUBERNETES, UNIT])
    assert not re.search(r"--redis-url|redis://[^\"]*:[^\"@]+@", text.replace("redis://worker:CHANGE-ME@", ""))


def test_unit_drains_before_systemd_kills():
    settings = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["Type"] == "notify"
    assert int(settings["TimeoutStopSec"]) > GRACE_S
    assert int(settings["WatchdogSec"]) > 0
    assert settings["RestartPreventExitStatus"] == "2"
    drained = {ExitCode.HUNG_UP, ExitCode.INTERRUPTED, ExitCode.TERMINATED}
    assert set(map(int, settings["SuccessExitStatus"].split())) == drained, "a stopped service has not failed"


def test_every_variable_that_is_set_is_a_setting():
    known = {variable_name(field) for field in Settings.model_fields}
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docker-compose.yml", *DOCKERFILES)]
    used = set(re.findall(r"\bEDGELLM_[A-Z_]+", "\n".join([*texts, UNIT, json.dumps(KUBERNETES)])))
    assert {"EDGELLM_REDIS_URL", "EDGELLM_MODEL"} <= used
    assert used <= known


def test_the_cpu_image_serves_the_bundled_checkpoint():
    (path,) = re.findall(r"EDGELLM_MODEL=\S+/site-packages/(\S+)", DOCKERFILES[0].read_text(encoding="utf-8"))
    assert (ROOT / "worker" / path / "model.safetensors").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path):
    unit = tmp_path / "edgellm-worker.service"
    unit.write_text(UNIT.replace("/opt/edgellm/bin/edgellm-worker", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
