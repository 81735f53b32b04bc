"""Images, Compose, Kubernetes and nginx as shipped agree with each other and with the server."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from specserve.config import Settings, load_settings, unused

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "examples" / "docker"
KUBERNETES = ROOT / "examples" / "kubernetes"
IMAGES = ("Dockerfile", "Dockerfile.cpu")


class Image:
    """The instructions of a Dockerfile, in order: ``("COPY", "a b")``."""

    def __init__(self, name: str) -> None:
        lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
        joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
        self.instructions = [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]

    def all(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        """Of the last stage."""
        stage = max(index for index, each in enumerate(self.instructions) if each[0] == "FROM")
        return [rest for instruction, rest in self.instructions[stage:] if instruction == name][-1]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in shlex.split(self.last("ENV")))


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Image:
    return Image(request.param)


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


class TestImages:
    def test_what_is_copied_is_there(self, image: Image) -> None:
        """In the repository, and not kept out by .dockerignore."""
        lines = (ROOT / ".dockerignore").read_text().splitlines()
        kept = [line[1:] for line in lines if line.startswith("!")]
        assert "*" in lines
        copied = [path for rest in image.all("COPY") if "--from" not in rest for path in rest.split()[:-1]]
        assert copied
        for path in copied:
            assert (ROOT / path).exists(), path
            assert path in kept
        assert sorted(kept) == sorted(copied)

    def test_packages_of_the_wheel_are_copied(self, image: Image) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        copied = " ".join(image.all("COPY"))
        for folder in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            assert folder in copied
        assert project["project"]["readme"] in copied
        (torch,) = [each for each in project["project"]["dependencies"] if re.match(r"torch\b", each)]
        assert f'"{torch}"' in image.all("RUN")[1]

    def test_runs_as_nobody_special(self, image: Image) -> None:
        """Kubernetes checks numbers alone."""
        user, group = image.last("USER").split(":")
        assert int(user) > 0
        assert int(group) > 0
        assert f"--uid {user} " in image.last("RUN")

    def test_starts_and_stops(self, image: Image) -> None:
        """Exec forms: a shell would keep signals to itself."""
        entry, command = json.loads(image.last("ENTRYPOINT")), json.loads(image.last("CMD"))
        assert entry == ["tini", "--", "python", "-m", "specserve.launch"]
        settings = load_settings(command, image.environment)
        assert settings.host == "0.0.0.0"
        assert str(settings.port) == image.last("EXPOSE")
        assert image.last("STOPSIGNAL") == "SIGTERM"
        check = image.last("HEALTHCHECK")
        assert "/health" in check
        assert json.loads(check.partition(" CMD ")[2])[0] == "python"

    def test_caches_are_in_the_volume(self, image: Image) -> None:
        volume = image.last("VOLUME")
        paths = [value for value in image.environment.values() if value.startswith("/cache")]
        assert paths
        assert all(path.startswith(volume + "/") for path in paths)

    def test_the_two_differ_where_they_must(self) -> None:
        cuda, cpu = map(Image, IMAGES)
        assert "/whl/cpu" in cpu.all("RUN")[1]
        assert "index-url" not in cuda.all("RUN")[1]
        assert "gcc" in cuda.last("RUN")
        for instruction in (
            "USER",
            "ENTRYPOINT",
            "CMD",
            "HEALTHCHECK",
            "EXPOSE",
            "VOLUME",
            "STOPSIGNAL",
            "FROM",
        ):
            assert cuda.last(instruction) == cpu.last(instruction)


class TestCompose:
    @pytest.fixture(scope="class")
    def services(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
        return found

    def replicas(self, services: dict[str, Any]) -> list[Any]:
        return [service for name, service in services.items() if name.startswith("replica-")]

    def test_nginx_knows_the_replicas(self, services: dict[str, Any]) -> None:
        addresses = [each["networks"]["inner"]["ipv4_address"] for each in self.replicas(services)]
        port = Image("Dockerfile.cpu").last("EXPOSE")
        named = re.findall(r"^server (\S+) ", (DOCKER / "replicas.conf").read_text(), re.MULTILINE)
        assert named == [f"{address}:{port}" for address in addresses]
        assert len(named) == 2

    def test_nginx_has_its_files(self, services: dict[str, Any]) -> None:
        nginx = services["nginx"]
        listen = re.findall(r"listen (\d+);", (DOCKER / "listen.conf").read_text())
        assert nginx["ports"] == [f"{port}:{port}" for port in listen]
        assert f":{listen[0]}/health" in nginx["healthcheck"]["test"][-1]
        mounted = {Path(volume.split(":")[0]).name for volume in nginx["volumes"]}
        included = set(re.findall(r"include (\S+);", (DOCKER / "nginx.conf").read_text()))
        assert mounted == included | {"nginx.conf"}
        assert all((DOCKER / name).exists() for name in mounted)
        assert int(nginx["user"].split(":")[0]) > 0

    def test_replicas_have_time_to_drain(self, services: dict[str, Any]) -> None:
        for replica in self.replicas(services):
            environ = {
                name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
                for name, value in replica["environment"].items()
            }
            settings = load_settings(replica["command"], environ)
            assert seconds(replica["stop_grace_period"]) > settings.drain_timeout + 10
            assert settings.speculative_algorithm == "EAGLE3"
            assert settings.model_path is None

    def test_files_of_images(self, services: dict[str, Any]) -> None:
        cuda = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())["services"]
        assert set(cuda) == {name for name in services if name.startswith("replica-")}
        devices = []
        for name, service in cuda.items():
            assert (DOCKER / services[name]["build"]["context"]).resolve() == ROOT
            for file in (services[name]["build"]["dockerfile"], service["build"]["dockerfile"]):
                assert (ROOT / file).exists()
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            devices += device["device_ids"]
        assert len(devices) == len(set(devices)) == 2


class TestKubernetes:
    @pytest.fixture(scope="class")
    def manifests(self) -> dict[str, Any]:
        """By kind."""
        found = [yaml.safe_load(file.read_text()) for file in sorted(KUBERNETES.glob("*.yaml"))]
        return {each["kind"]: each for each in found}

    @pytest.fixture(scope="class")
    def pod(self, manifests: dict[str, Any]) -> Any:
        return manifests["Deployment"]["spec"]["template"]["spec"]

    def test_schema(self, manifests: dict[str, Any]) -> None:
        for manifest in manifests.values():
            kubernetes_validate.validate(manifest, "1.31", strict=True)

    def test_labels(self, manifests: dict[str, Any], pod: Any) -> None:
        deployment = manifests["Deployment"]["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
        assert manifests["Service"]["spec"]["selector"] == labels
        assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
        assert pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"] == labels
        assert 0 < manifests["PodDisruptionBudget"]["spec"]["maxUnavailable"] < deployment["replicas"]

    def test_ports_and_probes(self, manifests: dict[str, Any], pod: Any) -> None:
        (container,) = pod["containers"]
        (port,) = container["ports"]
        assert str(port["containerPort"]) == Image("Dockerfile").last("EXPOSE")
        annotations = manifests["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(port["containerPort"])
        assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
        paths = {}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[name]["httpGet"]["port"] == port["name"]
            paths[name] = container[name]["httpGet"]["path"]
        assert paths == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/live"}

    def test_a_pod_has_time_to_drain(self, pod: Any) -> None:
        (container,) = pod["containers"]
        settings = load_settings(container["args"], {})
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > pause + settings.drain_timeout + 10

    def test_security(self, manifests: dict[str, Any], pod: Any) -> None:
        (container,) = pod["containers"]
        user, group = map(int, Image("Dockerfile").last("USER").split(":"))
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert {each["name"] for each in pod["volumes"]} == set(mounts)
        assert set(mounts.values()) == {"/tmp", Image("Dockerfile").last("VOLUME")}

    def test_each_rank_has_a_gpu(self, pod: Any) -> None:
        (container,) = pod["containers"]
        ranks = load_settings(container["args"], {}).tensor_parallel_size
        assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks

    def test_services_set_no_settings(self, manifests: dict[str, Any], pod: Any) -> None:
        """A Service named specserve would otherwise replace SPECSERVE_PORT by tcp://..., which is no port."""
        name = manifests["Service"]["metadata"]["name"].upper() + "_PORT"
        assert unused([], {name: "tcp://10.0.0.1:80"})
        assert pod["enableServiceLinks"] is False


def test_nginx_takes_what_servers_take() -> None:
    found = re.search(r"client_max_body_size (\d+)m;", (DOCKER / "nginx.conf").read_text())
    assert found
    assert int(found[1]) * 2**20 == Settings().max_body_bytes


def test_nginx_gives_idle_connections_up_first() -> None:
    """A replica would otherwise close one that nginx is about to use."""
    (upstream,) = re.findall(r"upstream replicas \{.*?\}", (DOCKER / "nginx.conf").read_text(), re.S)
    found = re.search(r"keepalive_timeout (\d+)s;.* a replica's (\d+) s", upstream)
    assert found
    assert int(found[1]) + 30 <= int(found[2]) == Settings().timeout_keep_alive


class TestSystemd:
    UNIT = ROOT / "examples" / "systemd" / "specserve.service"

    def test_starts_and_stops(self) -> None:
        unit = configparser.RawConfigParser()
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(self.UNIT)
        service = unit["Service"]
        program, *arguments = service["ExecStart"].split()
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        assert Path(program).name in scripts
        assert arguments[::2] == ["--config"]
        assert int(service["TimeoutStopSec"]) > Settings().drain_timeout + 10
        assert (service["KillMode"], service["RestartPreventExitStatus"]) == ("mixed", "2")
        caches = [pair.split("=")[1] for pair in service["Environment"].split()]
        assert all(path.startswith(f"/var/cache/{service['CacheDirectory']}/") for path in caches)

    def test_systemd_reads_it(self, tmp_path: Path) -> None:
        if (analyze := shutil.which("systemd-analyze")) is None:
            pytest.skip("systemd is not installed")
        copy = tmp_path / self.UNIT.name
        copy.write_text(re.sub("ExecStart=[^ ]+", f"ExecStart={sys.executable}", self.UNIT.read_text()))
        found = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=True)
        assert not found.stderr


def test_ray_serve_arguments() -> None:
    config = yaml.safe_load((ROOT / "examples" / "ray_serve" / "serve.yaml").read_text())
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"def {function}(" in source
    for name in application["args"]:
        assert re.search(rf"^    {name}: ", source, re.MULTILINE), name
    settings = load_settings(shlex.split(application["args"]["arguments"]), {})
    assert settings.speculative_algorithm == "EAGLE3"
