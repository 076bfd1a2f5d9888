"""What examples/deploy holds: the Dockerfile pleases a linter, the manifests keep to the schemas of
Kubernetes and of KubeRay, systemd's unit to systemd, and the commands in them are valid."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from runtime.config.flags import SERVE, make_parser, read_options

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "deploy"
DOCKERFILE = FOLDER / "Dockerfile"
KUBERNETES = "1.34"
MANIFESTS = sorted((FOLDER / "kuberay").glob("*.yaml"))

# -- KubeRay's kinds, as its v1 types have them: what they share with Kubernetes is checked by its own schemas


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
GROUP = {"rayStartParams": TEXTS, "template": {"type": "object"}}
CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions={"type": "object"},
    suspend=FLAG,
    authOptions=fields(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=fields(
        ("rayStartParams", "template"),
        **GROUP,
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        enableIngress=FLAG,
        headService={"type": "object"},
    ),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
            **GROUP,
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
        ),
    },
)
JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS),
    spec=fields(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        entrypointNumCpus={"type": "number"},
        entrypointNumGpus={"type": "number"},
        suspend=FLAG,
        rayClusterSpec=CLUSTER,
    ),
)


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]


def templates(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    yield cluster["headGroupSpec"]["template"]
    for group in cluster.get("workerGroupSpecs", ()):
        yield group["template"]


def check(document: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError, or kubernetes_validate's, which is one."""
    if document.get("apiVersion") != "ray.io/v1":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    jsonschema.validate(document, JOB)
    for template in templates(document):
        # The Service's own variables begin like the options'.
        assert template["spec"]["enableServiceLinks"] is False
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_manifests_keep_to_the_schemas(path: Path) -> None:
    found = documents(path)
    assert "RayJob" in {one["kind"] for one in found}
    for document in found:
        check(document)


def _head(job: dict[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    return head


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"].update(entryPoint="x"),
        lambda job: job["spec"].pop("entrypoint"),
        lambda job: _head(job).update(rayStartParams={"num-cpus": 0}),
        lambda job: _head(job)["template"]["spec"]["containers"][0].update(imagePull="Always"),
        lambda job: _head(job)["template"]["spec"]["containers"][0]["ports"][0].update(containerPort="x"),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("maxReplicas"),
        lambda job: job["spec"]["rayClusterSpec"].update(authOptions={"mode": "none"}),
    ],
)
def test_what_is_wrong_in_a_manifest_is_found(spoil: Callable[[Any], Any]) -> None:
    [job] = [one for one in documents(FOLDER / "kuberay" / "serve.yaml") if one["kind"] == "RayJob"]
    check(job)
    spoil(job)
    with pytest.raises(jsonschema.ValidationError):
        check(job)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_commands_in_the_manifests_are_valid_and_fit_the_pods(path: Path) -> None:
    [job] = [one for one in documents(path) if one["kind"] == "RayJob"]
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "runtime", "serve"]
    options = read_options(words[4:], {})
    replicas = options.replicas
    assert (replicas.engine, options.server.host) == ("ray", "0.0.0.0")
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    limits, servers = container["resources"]["limits"], len(replicas.roles)
    assert float(limits["cpu"]) >= replicas.replica_cpus * servers
    assert float(limits.get("nvidia.com/gpu", 0)) >= replicas.replica_gpus * servers
    # With surge a rolling restart needs room for one more.
    assert group["maxReplicas"] >= replicas.most + replicas.surge
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > options.server.drain_timeout_s
    [head] = _head(job)["template"]["spec"]["containers"]
    assert options.server.port in {one["containerPort"] for one in head["ports"]}
    assert {one["name"] for one in head["env"]} == {"SGLANG_DSL_API_KEY"}


def test_the_dockerfile_pleases_the_linter(tmp_path: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")

    def lint(file: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([linter, "--no-color", file], capture_output=True, text=True, timeout=300)

    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")
    spoiled = tmp_path / "Dockerfile"
    spoiled.write_text(DOCKERFILE.read_text().replace("python:3.12-slim-bookworm", "python:latest"))
    assert "DL3007" in lint(spoiled).stdout


def test_the_dockerfile_has_an_image_for_each_kind_of_machine_and_names_what_is_there() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert {"cpu", "cuda"} <= set(stages)
    assert text.count("USER 1000") == 2  # none of them serves as root
    for copied in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / copied).exists()
    for command in re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE):
        name, *rest = [word.strip(' "') for word in command.split(",")]
        assert name == "serve"
        assert read_options(rest, {}).server.host == "0.0.0.0"


# -- without Ray ---------------------------------------------------------------------------------------------

SERVER = FOLDER / "kubernetes" / "server.yaml"
UNIT = FOLDER / "systemd" / "sglang-dsl.service"


def test_the_manifest_of_a_server_fits_what_the_server_does() -> None:
    found = {one["kind"]: one for one in documents(SERVER)}
    for document in found.values():
        check(document)
    pod = found["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [port] = found["Service"]["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in container["ports"]}
    command, *rest = container["args"]
    options = read_options(rest, {}).server
    assert (command, options.host) == ("serve", "0.0.0.0")
    assert [one["containerPort"] for one in container["ports"]] == [options.port]
    assert {one["name"] for one in container["env"]} == {"SGLANG_DSL_API_KEY"}
    # The Service's own variables begin like the options'.
    assert pod["spec"]["enableServiceLinks"] is False
    ready, live = container["readinessProbe"], container["livenessProbe"]
    assert ready["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/ready"
    assert "tcpSocket" in live
    assert options.lame_duck_s > ready["periodSeconds"] * ready["failureThreshold"]
    patience = options.lame_duck_s + options.drain_timeout_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > patience


def unit_command(text: str) -> list[str]:
    [command] = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))


def test_the_unit_starts_a_server_and_waits_for_its_end() -> None:
    text = UNIT.read_text(encoding="utf-8")
    python, *words = unit_command(text)
    assert words[:3] == ["-m", "runtime", "serve"]
    read = Path("/opt/sglang-dsl/bin/python")
    assert Path(python) == read
    options = make_parser("serve", groups=SERVE).parse_args(words[3:])
    assert options.api_key_file == "${CREDENTIALS_DIRECTORY}/api-key"
    [patience] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(patience) > options.drain_timeout_s + getattr(options, "lame_duck_s", 0)
    assert "\nKillMode=mixed\n" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    def verify(text: str) -> str:
        unit = tmp_path / UNIT.name
        unit.write_text(text.replace("/opt/sglang-dsl/bin/python", sys.executable))
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return "\n".join(line for line in done.stderr.splitlines() if UNIT.name in line)

    text = UNIT.read_text(encoding="utf-8")
    assert verify(text) == ""
    assert "KilMode" in verify(text.replace("KillMode", "KilMode"))
