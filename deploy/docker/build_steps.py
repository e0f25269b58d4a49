"""The steps of a Dockerfile without Docker, and the compose file's services as processes on the loopback.

    python -m deploy.docker.build_steps [--build-arg TORCH_INSTALL_ARGS=...] [--model build/model] [--out build/docker]

An empty folder and a fresh virtual environment stand for the image: COPY copies into the folder what .dockerignore lets
through, RUN runs there if it is pip's, and is named if it is not. Then the image's command is run, and with a model the
services of compose.yaml, each on an address of its own, until every health check is content and a prompt has gone from
the prefill to the decode server. Exit code 1, and what failed, otherwise. What it cannot see is the base image.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from deploy.docker.dockerfile import (
    Instruction,
    assignments,
    is_ignored,
    load_compose,
    parse_dockerfile,
    parse_health_check,
)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
START_SECONDS = 180.0
PROMPT = "def read_lines(path): return open(path).read().splitlines() " * 40


class Image:
    """What the instructions make, below `folder`."""

    def __init__(self, folder: Path, build_args: Mapping[str, str]) -> None:
        self.folder, self._build_args = folder, build_args
        self.environment: dict[str, str] = {}
        self.command: list[str] = []
        self.health_check: tuple[str, ...] = ()
        self._args: dict[str, str] = {}
        self._directory = folder
        self._ignored = (ROOT / ".dockerignore").read_text()
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)

    def build(self, instructions: Sequence[Instruction]) -> None:
        """Raises CalledProcessError where a step fails."""
        for one in instructions:
            match one.name:
                case "FROM":
                    print(f"FROM {one.text}: Python {platform.python_version()} of this machine instead")
                case "ARG":
                    set_here = assignments(one)
                    self._args |= set_here | {
                        name: self._build_args[name] for name in set_here if name in self._build_args
                    }
                case "ENV":
                    self.environment |= {name: self.place(value) for name, value in assignments(one).items()}
                case "WORKDIR":
                    self._directory = Path(self.place(one.text))
                    self._directory.mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(*one.text.split())
                case "RUN":
                    self._run(one.text)
                case "ENTRYPOINT" | "CMD":
                    self.command += one.words
                case "HEALTHCHECK":
                    self.health_check = parse_health_check(one)[1]
                case _:
                    print(f"skipped: {one.name} {one.text}")

    def place(self, text: str) -> str:
        """A path of the image, in the folder that stands for it."""
        return str(self.folder) + text if re.fullmatch(r"(/\w+)+", text) else text

    def variables(self) -> dict[str, str]:
        """This process's, without settings of cairn's; pip's cache is the machine's own, and is used."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("CAIRN_", "VLLM_", "PYTHON"))}
        there = {name: value for name, value in self.environment.items() if name != "PIP_NO_CACHE_DIR"}
        return own | there | {"PATH": f"{self.bin}:{os.environ['PATH']}", "VIRTUAL_ENV": str(self.bin.parent)}

    def _copy(self, *words: str) -> None:
        *sources, target = words
        for source in sources:
            kept = [path for path in (ROOT / source, *(ROOT / source).rglob("*")) if path.is_file()]
            for path in kept:
                inside = path.relative_to(ROOT)
                if not is_ignored(inside, self._ignored):
                    place = (
                        self._directory
                        / target
                        / (path.relative_to(ROOT / source) if path != ROOT / source else source)
                    )
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, place)

    def _run(self, line: str) -> None:
        if not line.startswith("pip "):
            print(f"skipped: RUN {line}")
            return
        print(f"RUN {line}", flush=True)
        subprocess.run(
            ["sh", "-euc", f"{line} --quiet"], cwd=self._directory, env=self.variables() | self._args, check=True
        )


# -- the services ------------------------------------------------------------------------------------------------------


class Services:
    """The compose file's, as processes; a service's name is an address of the loopback."""

    def __init__(self, image: Image, model: Path) -> None:
        compose = load_compose((FOLDER / "compose.yaml").read_text(), {"CAIRN_MODEL": str(model.absolute())})
        self._image, self._services = image, compose["services"]
        self.addresses = {name: f"127.0.0.{number}" for number, name in enumerate(self._services, 11)}
        self._secret = image.folder / "kv-secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text("nobody else knows these bytes")

    def start(self, name: str, stack: ExitStack) -> "subprocess.Popen[bytes]":
        """The process, which is healthy. Raises RuntimeError if it does not become so."""
        service, log = self._services[name], self._image.folder / f"{name}.log"
        environment = self._image.variables() | {
            key: self._here(value) for key, value in service["environment"].items()
        }
        environment |= {"CAIRN_HOST": self.addresses[name], "CAIRN_PROXY_HOST": self.addresses[name]}
        command, *words = service["command"]
        arguments = [command, *map(self._here, words)]
        print("cairn", *arguments, flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self._image.bin / "cairn", *arguments],
                cwd=self._image.folder / "models",
                env=environment,
                stderr=output,
            )
        stack.callback(process.kill)
        check = [word.replace("127.0.0.1", self.addresses[name]) for word in self._image.health_check]
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(check, env=environment, stderr=subprocess.DEVNULL).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} is not healthy:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        return process

    def _here(self, text: str) -> str:
        text = text.replace("/run/secrets/kv", str(self._secret))
        return re.sub(
            rf"(?<![\w/-])({'|'.join(self.addresses)})(?![\w/-])|(?<=//)({'|'.join(self.addresses)})(?=:)",
            lambda found: self.addresses[found[0]],
            text,
        )


def try_services(image: Image, model: Path) -> None:
    """Raises RuntimeError where a service fails, or no page of a prompt has gone from one server to the other."""
    services = Services(image, model)
    with ExitStack() as stack:
        processes = {name: services.start(name, stack) for name in ("prefill", "decode", "proxy")}
        body = json.dumps({"model": str(model.absolute()), "prompt": PROMPT, "max_tokens": 8, "temperature": 0})
        with contextlib.closing(http.client.HTTPConnection(services.addresses["proxy"], 8000, timeout=60)) as proxy:
            proxy.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = proxy.getresponse()
            said = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"the proxy answered {answer.status}: {said}")
        cache = json.loads(said)["cairn"]["cache"]
        print(f"through the proxy: {cache}")
        if not cache["received_tokens"]:
            raise RuntimeError("the decode server received nothing from the prefill server")
        for name, process in reversed(processes.items()):
            process.terminate()
            if process.wait(timeout=40) != 0:
                raise RuntimeError(f"{name} ended with {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder, to run the services with")
    parser.add_argument("--out", type=Path, default=Path("build/docker"), help="made anew; default: %(default)s")
    parsed = parser.parse_args()
    shutil.rmtree(parsed.out, ignore_errors=True)
    parsed.out.mkdir(parents=True)
    image = Image(parsed.out.absolute(), dict(word.split("=", 1) for word in parsed.build_arg))
    try:
        image.build(list(parse_dockerfile((FOLDER / "cpu.Dockerfile").read_text())))
        for arguments in (image.command, [image.command[0], "--version"]):
            print(*arguments, flush=True)
            command = [image.bin / arguments[0], *arguments[1:]]
            subprocess.run(command, cwd=image.folder / "models", env=image.variables(), check=True)
        if parsed.model is not None:
            try_services(image, parsed.model)
    except (subprocess.SubprocessError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print("all steps done; no image was built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
