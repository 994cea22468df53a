"""docker-compose.yml and the Dockerfiles: that what they name exists. No container engine is needed."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from kitsune.cli.main import full_app

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]


def dockerfile(service: str) -> str:
    return (ROOT / SERVICES[service]["build"]["dockerfile"]).read_text()


def command_of(service: str) -> list[str]:
    given = SERVICES[service].get("command")
    if given is not None:
        return list(given)
    line = next(line for line in dockerfile(service).splitlines() if line.startswith("CMD "))
    return list(yaml.safe_load(line.removeprefix("CMD ")))


def test_the_services_are_those_of_a_team():
    assert set(SERVICES) == {"postgres", "migrate", "server", "worker"}
    assert set(COMPOSE["volumes"]) == {"postgres", "server", "worker"}


@pytest.mark.parametrize("service", OURS)
def test_commands_are_those_of_the_command_line(service):
    program, *words = command_of(service)
    assert program == "kitsune"
    group = typer.main.get_command(full_app())
    command = group.commands[words[0]]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words[1:] if word.startswith("--")} <= options


@pytest.mark.parametrize("service", OURS)
def test_images_hold_what_the_wheel_needs(service):
    copied = set(re.findall(r"^COPY (.+) \S+$", dockerfile(service), re.MULTILINE))
    names = {name for line in copied for name in shlex.split(line)}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "scripts"}
    assert packages <= names
    assert all((ROOT / name).exists() for name in names)
    kept = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{name}" for name in names} <= set(kept)


@pytest.mark.parametrize("service", OURS)
def test_nothing_runs_as_root_or_may_become_it(service):
    assert re.search(r"^USER (?!root)", dockerfile(service), re.MULTILINE)
    assert SERVICES[service]["cap_drop"] == ["ALL"]
    assert SERVICES[service]["security_opt"] == ["no-new-privileges:true"]


def test_the_schema_is_there_before_anybody_uses_it():
    assert SERVICES["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    for service in ("server", "worker"):
        assert SERVICES[service]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


def test_only_this_host_reaches_the_server_and_nobody_the_database():
    assert SERVICES["server"]["ports"] == ["127.0.0.1:8537:8537"]
    assert "ports" not in SERVICES["postgres"]


def test_no_password_is_written_down():
    environment = SERVICES["postgres"]["environment"]
    assert environment["POSTGRES_PASSWORD"].startswith("${KITSUNE_POSTGRES_PASSWORD:?")
    assert "${KITSUNE_POSTGRES_PASSWORD:?" in SERVICES["server"]["environment"]["KITSUNE_DATABASE_URL"]


def test_a_worker_has_a_gpu_of_its_own_and_time_to_give_its_run_back():
    (device,) = SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert int(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) >= 20
