"""deploy/docker: every command line against the real parser, and what P, D and the proxy have to agree on.

`problems` reads texts, so that the mutants at the end can show what it finds.
"""

import argparse
import os
import re
import tomllib
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from deploy.docker.dockerfile import (
    assignments,
    expand,
    is_ignored,
    load_compose,
    merge_compose,
    parse_dockerfile,
    parse_health_check,
)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cairn.cli import engine_config, main
from cairn.errors import ConfigError
from cairn.proxy.app import _OPEN_PATHS as PROXY_PATHS
from cairn.proxy.options import ProxyOptions
from cairn.server.app import find_open_paths
from cairn.server.options import ServerOptions
from cairn.settings.kv import kv_transfer_settings
from cairn.settings.proxy import ProxySettings, add_proxy_flags, load_proxy_settings
from cairn.settings.serve import ServeSettings, add_flags, load_settings
from cairn.transfer.peers import PeerPolicy
from source_scan import ROOT

FOLDER = ROOT / "deploy" / "docker"
CPU, CUDA, COMPOSE, GPUS = "cpu.Dockerfile", "cuda.Dockerfile", "compose.yaml", "compose.cuda.yaml"
IGNORED, PROJECT = ".dockerignore", "pyproject.toml"
SERVERS, PROXY = ("prefill", "decode"), "proxy"
SECRETS = "/run/secrets/"
NEEDED_TO_INSTALL = {"pyproject.toml", "README.md", "LICENSE", "src"}


def texts():
    files = {name: (FOLDER / name).read_text() for name in (CPU, CUDA, COMPOSE, GPUS)}
    return files | {name: (ROOT / name).read_text() for name in (IGNORED, PROJECT)}


def problems(files, secret):
    """What is wrong, a line each; `secret`: a file that is one."""
    project = tomllib.loads(files[PROJECT])["project"]
    for name in (CPU, CUDA):
        yield from (f"{name}: {one}" for one in image_problems(files[name], files[IGNORED], project, gpu=name == CUDA))
    compose, images = load_compose(files[COMPOSE], {}), dict.fromkeys((*SERVERS, PROXY), CPU)
    yield from (f"{COMPOSE}: {one}" for one in compose_problems(compose, images, files, secret))
    merged, images = merge_compose(compose, load_compose(files[GPUS], {})), images | dict.fromkeys(SERVERS, CUDA)
    yield from (f"{GPUS}: {one}" for one in compose_problems(merged, images, files, secret))
    yield from (f"{GPUS}: {one}" for one in gpu_problems(merged["services"]))


# -- images ------------------------------------------------------------------------------------------------------------


def image_problems(text, ignored, project, *, gpu):
    image = list(parse_dockerfile(text))
    (base,) = (one.text for one in image if one.name == "FROM")
    pinned = re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-\w+", base)
    if pinned is None or pinned[1] not in SpecifierSet(project["requires-python"]):
        yield f"FROM {base}: not a Python of one version that {project['requires-python']} takes"
    users = [one.text for one in image if one.name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield f"runs as {users}, not as a user by number"
    if users and f"--uid {users[-1].partition(':')[0]} " not in text:
        yield "nobody makes the user that it runs as"
    yield from copy_problems(image, ignored)
    yield from install_problems(image, project, gpu=gpu)
    entry = [word for one in image if one.name in ("ENTRYPOINT", "CMD") for word in one.words]
    if entry[:1] != ["cairn"] or main(entry[1:]) != 0:
        yield f"its command {entry} fails"
    yield from health_problems(image)
    known = {f"CAIRN_{name}".upper() for name in ServeSettings.model_fields}
    known |= {f"CAIRN_PROXY_{name}".upper() for name in ProxySettings.model_fields}
    yield from (
        f"ENV {name} is no setting" for name in environment_of(image) if name.startswith("CAIRN_") and name not in known
    )


def environment_of(image):
    return {name: value for one in image if one.name == "ENV" for name, value in assignments(one).items()}


def copy_problems(image, ignored):
    for one in image:
        if one.name == "ADD":
            yield "ADD: COPY does no more than it says"
        if one.name == "COPY":
            for source in one.text.split()[:-1]:
                if not (ROOT / source).exists() or is_ignored(Path(source), ignored):
                    yield f"COPY {source}: is not in the context"
    paths = [Path("src/cairn/__init__.py"), Path("src/cairn/server/cache_page/page.html")]
    yield from (f"{path} is not in the context" for path in paths if is_ignored(path, ignored))
    unwanted = [".git/config", "build/model/config.json", "deploy/docker/kv-secret", "src/cairn/__pycache__/a.pyc"]
    yield from (f"{path} is in the context" for path in unwanted if not is_ignored(Path(path), ignored))


def install_problems(image, project, *, gpu):
    copied, installed, variables = set(), [], {}
    for one in image:
        if one.name == "ARG":
            variables |= assignments(one)
        if one.name == "COPY":
            copied |= set(one.text.split()[:-1])
        if one.name == "RUN" and "apt-get install" in one.text:
            if "--no-install-recommends" not in one.text or "rm -rf /var/lib/apt/lists/*" not in one.text:
                yield f"RUN {one.text}: more than is needed stays in the image"
            installed += re.findall(r"\bgcc\b", one.text)
        if one.name == "RUN" and one.text.startswith("pip install "):
            line = expand(one.text, variables)
            if "constraints.txt" not in copied or "constraints.txt" not in line:
                yield f"RUN {line}: versions are not those of constraints.txt"
            if own := re.search(r'"\.(?:\[([\w,-]+)\])?"', line):
                if missing := NEEDED_TO_INSTALL - copied:
                    yield f"RUN {line}: {sorted(missing)} are not there"
                extras = (own[1] or "").split(",")
                yield from (
                    f"RUN {line}: there is no extra {extra!r}"
                    for extra in extras
                    if extra not in project["optional-dependencies"]
                )
                if not {"nixl", *(["cuda"] if gpu else [])} <= set(extras):
                    yield f"RUN {line}: an extra is missing"
                installed.append("cairn")
            else:
                installed.append("torch for the CPU" if re.search(r"--index-url \S+/cpu\b", line) else "torch")
    if installed != (["gcc", "torch", "cairn"] if gpu else ["torch for the CPU", "cairn"]):
        yield f"installs {installed}"


def health_problems(image):
    (check,) = (one for one in image if one.name == "HEALTHCHECK")
    options, words = parse_health_check(check)
    if words[:2] != ("python", "-c"):
        yield f"HEALTHCHECK {words}: the image has no such program"
        return
    compile(words[2], "HEALTHCHECK", "exec")
    place = re.search(r"\('127\.0\.0\.1', (\d+), timeout=(\d+)\).*request\('GET', '([^']+)'\)", words[2])
    if place is None or place[3] not in find_open_paths(ServerOptions()) & PROXY_PATHS:
        yield f"HEALTHCHECK {words[2]}: a path that server and proxy do not both have"
    elif int(place[1]) != ServerOptions().port or int(place[2]) >= int(options["timeout"][:-1]):
        yield f"HEALTHCHECK {words[2]}: another port, or it waits longer than it may take"
    if float(options["start-period"][:-1]) < ServeSettings.model_fields["start_timeout"].default:
        yield "HEALTHCHECK: a server that is still loading is unhealthy"


# -- compose files -----------------------------------------------------------------------------------------------------


def compose_problems(compose, images, files, secret):
    """`images`: the Dockerfile of each service."""
    services, settings = compose["services"], {}
    for name, service in services.items():
        dockerfile, image = f"deploy/docker/{images[name]}", list(parse_dockerfile(files[images[name]]))
        yield from (f"{name}: {one}" for one in container_problems(service, compose, dockerfile))
        environment = environment_of(image) | service["environment"]
        try:
            settings[name] = parse_command(tuple(service["command"]), tuple(sorted(environment.items())), secret)
        except (ConfigError, SystemExit) as error:
            yield f"{name}: {service['command']}: {error}"
            return
        period = float(service["stop_grace_period"].removesuffix("s"))
        if period <= settings[name].shutdown_timeout:
            yield f"{name}: is killed while it drains"
        (check,) = (one for one in image if one.name == "HEALTHCHECK")
        if f", {settings[name].port}, " not in check.text or settings[name].host != "0.0.0.0":
            yield f"{name}: listens on {settings[name].host}:{settings[name].port}, where nobody asks"
    yield from agreement_problems(services, settings)
    proxy = settings[PROXY]
    (published,) = services[PROXY]["ports"]
    if any(services[name].get("ports") for name in SERVERS) or not published.endswith(f":{proxy.port}"):
        yield f"published is {published}"
    for role, urls in (("prefill", proxy.prefill), ("decode", proxy.decode)):
        if urls != [f"http://{role}:{settings[role].port}"]:
            yield f"the proxy's --{role} is {urls}"
    if set(services[PROXY]["depends_on"]) != set(SERVERS) or services[PROXY].get("secrets"):
        yield "the proxy waits for others, or holds the secret"


@cache
def parse_command(words, environment, secret):
    """Its settings, as the process would have them. Raises ConfigError or SystemExit. Kept, for a mutant changes one of
    six command lines, and each takes a twentieth of a second."""
    with mock.patch.dict(os.environ, dict(environment), clear=True):
        return parse_words(words, secret)


def parse_words(words, secret):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if words[0] == "proxy":
        source = add_proxy_flags(parser)
        return load_proxy_settings(parser.parse_args(words[1:]), source)
    assert words[0] == "serve"
    source = add_flags(parser)
    settings = load_settings(parser.parse_args(words[1:]), source)
    given = settings.kv_secret_file
    engine_config(settings.model_copy(update={"kv_secret_file": None if given is None else secret}))
    return settings


def gpu_problems(services):
    """Whether each server computes on a GPU that is its own."""
    taken = []
    for name in SERVERS:
        (device,) = services[name]["deploy"]["resources"].get("reservations", {}).get("devices", [{}])
        if device.get("driver") != "nvidia" or device.get("capabilities") != ["gpu"]:
            yield f"{name}: has no GPU"
        if services[name]["environment"].get("CAIRN_DEVICE") != "cuda":
            yield f"{name}: computes on the CPU"
        if services[name]["image"] == services[PROXY]["image"]:
            yield f"{name}: is the proxy's image"
        taken += device.get("device_ids", [])
    if len(set(taken)) < len(SERVERS):
        yield f"the servers share GPUs {taken}"


def container_problems(service, compose, dockerfile):
    if service["build"] != {"context": "../..", "dockerfile": dockerfile} or not (ROOT / dockerfile).exists():
        yield f"is built from {service['build']}"
    if "user" in service or "privileged" in service or service["cap_drop"] != ["ALL"]:
        yield "may do more than the image's user"
    if service["security_opt"] != ["no-new-privileges:true"] or service["read_only"] is not True:
        yield "may change what it is"
    if not {"cpus", "memory", "pids"} <= service["deploy"]["resources"].get("limits", {}).keys():
        yield "has no limits"
    for kind, named in (
        ("secrets", service.get("secrets", [])),
        ("networks", service["networks"]),
        ("volumes", [each.partition(":")[0] for each in service.get("volumes", [])]),
    ):
        yield from (f"there is no {each} among the {kind}" for each in named if each not in compose[kind])
    for name, value in service["environment"].items():
        if not isinstance(value, str):
            yield f"{name} is no text"


def agreement_problems(services, settings):
    """What both servers must hold for a prompt to go from one to the other, and the next turn back."""
    prefill, decode = (settings[name] for name in SERVERS)
    for name, other in zip(SERVERS, reversed(SERVERS), strict=True):
        mine, environment = settings[name], services[name]["environment"]
        file = str(mine.kv_secret_file)
        if file.removeprefix(SECRETS) not in services[name]["secrets"]:
            yield f"{name}: --kv-secret-file {file} is none of its secrets"
        if environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST") != name:
            yield f"{name}: its side channel is not where others find it"
        if environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "0") == "0":
            yield f"{name}: its side channel has no port of its own"
        if PeerPolicy((mine.kv_peer_allowlist or "").split(","), has_secret=True).refusal(other):
            yield f"{name}: may not fetch from {other}"
        if mine.kv_transfer_config is None or kv_transfer_settings(mine.kv_transfer_config).kv_role != "kv_both":
            yield f"{name}: does not do both, so the next turn cannot go back"
        if mine.forwarded_allow_ips is None:
            yield f"{name}: takes all clients for one"
        if not any(volume.endswith(":/models") for volume in services[name]["volumes"]):
            yield f"{name}: has no place for models"
    if (prefill.model, prefill.kv_secret_file) != (decode.model, decode.kv_secret_file):
        yield "the servers' models or secrets differ"
    for kind in ("secrets", "volumes", "networks"):
        if services["prefill"][kind] != services["decode"][kind]:
            yield f"the servers' {kind} differ"
    if not set(services[PROXY]["networks"]) & set(services["prefill"]["networks"]):
        yield "the proxy does not reach the servers"
    if len({tuple(settings[name].api_key or ()) for name in (*SERVERS, PROXY)}) > 1:
        yield "the API keys differ"


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("docker") / "secret"
    path.touch(mode=0o600)
    path.write_text("nobody else knows these bytes")
    return path


def test_images_and_services_are_as_they_should_be(secret):
    assert list(problems(texts(), secret)) == []


def test_all_take_the_one_api_key(secret):
    files = texts()
    assert files[COMPOSE].count("${CAIRN_API_KEY:-}") == 3
    files[COMPOSE] = files[COMPOSE].replace("${CAIRN_API_KEY:-}", "k")
    assert list(problems(files, secret)) == []


def test_variables_are_described():
    files = texts()
    named = set(re.findall(r"\$\{(\w+)", files[COMPOSE] + files[GPUS]))
    described = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "containers.md").read_text(), flags=re.MULTILINE))
    assert named == described


def test_the_extra_takes_the_triton_of_the_images():
    (extra,) = tomllib.loads((ROOT / PROJECT).read_text())["project"]["optional-dependencies"]["cuda"]
    (pinned,) = re.findall(r"^triton==(\S+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned in Requirement(extra).specifier and str(Requirement(extra).marker) == 'sys_platform == "linux"'
    minimum = re.search(r"Triton that it brings \((\S+) or newer\)", (ROOT / "docs" / "gpu.md").read_text())
    assert f">={minimum[1]}" in str(Requirement(extra).specifier)


def test_what_is_ignored():
    patterns = "*\n!src\n!a*.md\n**/__pycache__\n"
    taken = [Path(each) for each in ("src", "src/x/y.py", "about.md")]
    left = [Path(each) for each in ("b", "b/src", "src/__pycache__", "src/x/__pycache__/y.pyc")]
    assert not any(is_ignored(each, patterns) for each in taken) and all(is_ignored(each, patterns) for each in left)


def test_a_default_port_is_the_same_for_both():
    assert ServerOptions().port == ProxyOptions(decode=["http://d:1"]).port


MUTANTS = [
    (CPU, "python:3.11.14-slim-bookworm", "python:latest", "FROM python:latest"),
    (CPU, "python:3.11.14-slim-bookworm", "python:3.10.14-slim-bookworm", "FROM python:3.10"),
    (CUDA, "USER 10001:10001", "USER root", "runs as"),
    (CPU, "USER 10001:10001\n", "", "runs as"),
    (CPU, "--uid 10001 ", "--uid 10002 ", "nobody makes the user"),
    (CPU, "COPY src ./src", "COPY source ./src", "COPY source: is not in the context"),
    (CPU, "COPY pyproject.toml README.md LICENSE ./", "COPY pyproject.toml README.md ./", "['LICENSE'] are not there"),
    (CPU, "COPY constraints.txt ./\n", "", "not those of constraints.txt"),
    (CPU, "/whl/cpu", "/whl/cu130", "installs ['torch', 'cairn']"),
    (CPU, "${TORCH_INSTALL_ARGS} ", "", "installs ['torch', 'cairn']"),
    (CPU, '".[nixl]"', '".[nixel]"', "there is no extra 'nixel'"),
    (CUDA, "[cuda,nixl]", "[nixl]", "an extra is missing"),
    (CUDA, "gcc libc6-dev", "libc6-dev", "installs ['torch', 'cairn']"),
    (CUDA, " --no-install-recommends", "", "more than is needed"),
    (CPU, 'CMD ["--help"]', 'CMD ["--halp"]', "fails"),
    (CPU, "'/health'", "'/healthz'", "do not both have"),
    (CUDA, "'/health'", "'/load'", "do not both have"),
    (CPU, "'127.0.0.1', 8000", "'127.0.0.1', 8080", "another port"),
    (CPU, "--start-period=1800s", "--start-period=60s", "still loading"),
    (CPU, "CAIRN_HOST", "CAIRN_HOSTS", "CAIRN_HOSTS is no setting"),
    (IGNORED, "!src\n", "", "COPY src"),
    (IGNORED, "*\n!c", "!c", "kv-secret is in the context"),
    (PROJECT, "\ncuda = ", "\ngpu = ", "there is no extra 'cuda'"),
    (COMPOSE, "--kv-peer-allowlist", "--kv-peers", "prefill"),
    (COMPOSE, "NixlConnector", "OtherConnector", "NixlConnector is the only connector"),
    (COMPOSE, "kv_both", "kv_consumer", "does not do both"),
    (COMPOSE, "--kv-peer-allowlist=prefill,decode", "--kv-peer-allowlist=prefill", "may not fetch from decode"),
    (COMPOSE, "    - --kv-secret-file=/run/secrets/kv\n", "", "is not loopback"),
    (COMPOSE, "/run/secrets/kv", "/run/secrets/key", "none of its secrets"),
    (COMPOSE, "  secrets: [kv]\n", "  secrets: [key]\n", "no key among the secrets"),
    (COMPOSE, "HOST: decode", "HOST: prefill", "not where others find it"),
    (COMPOSE, "--decode=http://decode:8000", "--decode=http://decode:8001", "--decode is"),
    (COMPOSE, "--prefill=http://prefill:8000", "--prefill=http://decode:8000", "--prefill is"),
    (COMPOSE, "--prefill=http", "--prefil=http", "proxy"),
    (COMPOSE, '}:8000"', '}:9000"', "published"),
    (COMPOSE, "    - --forwarded-allow-ips=*\n", "    - --port=9000\n", "where nobody asks"),
    (COMPOSE, "stop_grace_period: 40s", "stop_grace_period: 10s", "while it drains"),
    (COMPOSE, "read_only: true", "user: root\n  read_only: true", "more than the image's user"),
    (COMPOSE, "  cap_drop: [ALL]", "  cap_drop: []", "more than the image's user"),
    (COMPOSE, "networks: [servers, front]", "networks: [front]", "does not reach"),
    (COMPOSE, 'limits: {cpus: "1", memory: 1g, pids: 256}', "limits: {pids: 256}", "has no limits"),
    (COMPOSE, "CAIRN_PROXY_API_KEY: ${CAIRN_API_KEY:-}", "CAIRN_PROXY_API_KEY: other", "API keys differ"),
    (COMPOSE, "cpu.Dockerfile}", "Dockerfile}", "is built from"),
    (GPUS, "cuda.Dockerfile", "cpu.Dockerfile", "is built from"),
    (GPUS, "image: cairn:cuda", "image: cairn:cpu", "is the proxy's image"),
    (GPUS, "CAIRN_DEVICE: cuda", "CAIRN_DEVICE: cpu", "computes on the CPU"),
    (GPUS, "CAIRN_DEVICE: cuda", "CAIRN_DEVICE: gpu", "prefill"),
    (GPUS, "capabilities: [gpu]", "capabilities: [utility]", "has no GPU"),
    (GPUS, "CAIRN_DECODE_GPU:-1", "CAIRN_DECODE_GPU:-0", "share GPUs"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), MUTANTS)
def test_what_is_wrong_is_found(file, old, new, said, secret, capsys):
    files = texts()
    assert old in files[file]
    files[file] = files[file].replace(old, new)
    found = list(problems(files, secret))
    assert any(said in one for one in found), found
