"""A pytest plugin that lets vLLM's own server tests run against cairn, without vLLM.

It gives the tests, which stay as they were published, three things: a `tests.utils` whose `RemoteOpenAIServer` starts
`cairn serve` with a tiny checkpoint; stand-ins for the modules of vllm (and torch, where it is not installed) that
tests import; and a record, a line of JSON for each test, of what came of it and of which of vLLM's own objects it
asked something.

Read from the environment: CAIRN (the command), CAIRN_MODEL and CAIRN_VISION_MODEL (checkpoint folders), BED_RESULTS
(the record), BED_LOGS (a folder for the servers' logs).
"""

import base64
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from functools import cache
from pathlib import Path

import pytest
import transformers

SECONDS_TO_START = 120
# A small server: cairn's own sizes are chosen by the machine.
ALWAYS = ["--kv-cache-memory-bytes", "256MiB"]
# what only a model of vLLM's test bed has: parsers of its answers, where its files lie, what it is divided among
OTHER_MODEL = {
    "--tokenizer-mode", "--tokenizer_mode", "--load-format", "--load_format", "--config-format", "--config_format",
    "--hf-overrides", "--tensor-parallel-size", "-tp", "--quantization", "--revision",
}  # fmt: skip
LORA = {"--enable-lora", "--lora-modules", "--max-lora-rank", "--max-cpu-loras", "--max-loras"}
ALLOWED = {
    "--dtype": {"auto", "float32", "bfloat16"},
    "--reasoning-parser": {"qwen3", "deepseek_r1"},
}
# How the scripted checkpoint writes calls, whatever the model that it stands for.
CALLS = "hermes"
# The tiny vocabulary needs more tokens for the same words: a prompt with two tools has more than 900.
CONTEXT = {"1024": "4096", "2048": "8192"}
# Counts the tokens of a prompt shorter than a block of vLLM's cache, which finds none of it again.
WITHOUT_CACHE = re.compile("TinyLlama")
# Tests of servers with these flags ask for what cairn is not.
NOT_CAIRNS = {"--watermark-config": "watermarks"}
ABOUT_MACHINE = re.compile(r"current_platform|hf_api|init_logger")
asked: set[str] = set()


class StandIn:
    """Anything of vLLM's: every attribute, item and answer of it is another one, and it is false."""

    def __init__(self, name):
        self.__name__ = self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        if not ABOUT_MACHINE.search(self._name):
            asked.add(self._name)
        return StandIn(f"{self._name}()")

    def __mro_entries__(self, bases):
        return ()

    def __getitem__(self, key):
        return self

    def __or__(self, other):
        return self

    __ror__ = __and__ = __rand__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


class StandInModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Error"):
            value = type(name, (ValueError,), {})
        else:
            value = StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of the packages."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandInModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        for name, value in REAL.get(module.__name__, {}).items():
            setattr(module, name, value)


WITH_IMAGES = re.compile(r"vision|VLM|-VL-|/Qwen2.5-VL|llava|InternVL|gemma-3", re.IGNORECASE)


def checkpoint_for(name):
    """The folder that stands for a model of vLLM's tests: with images or without."""
    return os.environ["CAIRN_VISION_MODEL" if WITH_IMAGES.search(name) else "CAIRN_MODEL"]


def get_tokenizer(tokenizer_name, *args, **kwargs):
    return transformers.AutoTokenizer.from_pretrained(checkpoint_for(tokenizer_name))


def load_from_bed(transformers_class):
    """A hub's name is the folder of the checkpoint that stands for it."""
    original = transformers_class.from_pretrained

    def from_pretrained(name, *args, **kwargs):
        return original(name if Path(name).exists() else checkpoint_for(str(name)), *args, **kwargs)

    transformers_class.from_pretrained = from_pretrained


class Processor:
    """transformers' AutoProcessor for an image, without torch: what a prompt's tokens are by the published rule of
    Qwen2-VL's processor. The image's sides become multiples of two patches, within bounds of the area."""

    def __init__(self, name):
        folder = Path(checkpoint_for(name))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._settings = json.loads((folder / "preprocessor_config.json").read_text())

    @classmethod
    def from_pretrained(cls, name, **settings):
        return cls(name)

    def __call__(self, prompt, images, **settings):
        for number, image in enumerate(images, 1):
            pads = "<|image_pad|>" * self._num_tokens(*image.size)
            prompt = prompt.replace(f"<|image_{number}|>\n", f"<|vision_start|>{pads}<|vision_end|>")
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        return types.SimpleNamespace(input_ids=types.SimpleNamespace(shape=(1, len(ids))))

    def _num_tokens(self, width, height):
        side = self._settings["patch_size"] * self._settings["merge_size"]
        least, most = (self._settings["size"][edge] for edge in ("shortest_edge", "longest_edge"))
        across, down = (max(1, round(pixels / side)) for pixels in (width, height))
        area = across * down * side * side
        if area > most:
            shrink = math.sqrt(width * height / most)
            across, down = (max(1, math.floor(pixels / shrink / side)) for pixels in (width, height))
        elif area < least:
            grow = math.sqrt(least / (width * height))
            across, down = (math.ceil(pixels * grow / side) for pixels in (width, height))
        return across * down


class ModelConfig:
    """vLLM's name: tells the size of the vocabulary."""

    def __init__(self, model, **settings):
        self._folder = Path(checkpoint_for(model))

    def get_vocab_size(self):
        return json.loads((self._folder / "config.json").read_text())["vocab_size"]


def image_bytes(image, form="PNG"):
    image = getattr(image, "media", image)
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def encode_image_base64(image, *args, **kwargs):
    return base64.b64encode(image_bytes(image)).decode()


def encode_image_url(image, *args, **kwargs):
    return f"data:image/png;base64,{encode_image_base64(image)}"


def fetch_image(url, *args, **kwargs):
    from PIL import Image

    with urllib.request.urlopen(url, timeout=10) as answer:
        image = Image.open(io.BytesIO(answer.read()))
        image.load()
        return image


@cache
def made_image(name):
    """An image of the name's kind: a gray, a palette's, one with transparency, else RGB; large sides cut to 320."""
    from PIL import Image

    mode = "L" if "Gray" in name else "RGBA" if "RGBA" in name else "RGB"
    return Image.linear_gradient("L").resize((320, 240)).convert(mode)


class ImageAsset:
    def __init__(self, name):
        self.pil_image = made_image(name)


class ImageServer:
    """vLLM's images lie in a bucket: here they are made, and sent along: cairn fetches from no private address."""

    def url_for(self, name):
        return encode_image_url(made_image(name))

    def get_image_asset(self, name):
        return made_image(name)


class IntegerRange:
    def __init__(self, kind):
        self.min, self.max = -(2**63), 2**63 - 1


REAL = {
    "torch": {"iinfo": IntegerRange, "long": "int64", "int64": "int64"},
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm": {"version": types.SimpleNamespace(_prev_minor_version=lambda: "0.32")},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.assets.image": {"ImageAsset": ImageAsset},
    "vllm.multimodal.utils": {
        "encode_image_url": encode_image_url,
        "encode_image_base64": encode_image_base64,
        "fetch_image": fetch_image,
    },
    "vllm.multimodal.media": {"MediaWithBytes": type("MediaWithBytes", (), {})},
    "vllm.utils.network_utils": {"get_open_port": lambda: free_port()},
}


def end_with_parent():
    """A server does not outlive pytest, even one that was killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@cache
def known_flags():
    text = subprocess.run([os.environ["CAIRN"], "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))


def with_scripts(template, model):
    """A copy of a test's own chat template that ends with the scripts' conditions, as the checkpoint's own does, and
    else with what its answer to all other chats follows on."""
    copy = Path(os.environ["BED_LOGS"]) / f"scripted-{Path(template).name}"
    scripts = (Path(checkpoint_for(model)) / "scripts.jinja").read_text().removesuffix("{%- endif -%}")
    otherwise = "{%- else -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    # some templates take messages out of the list as they write them
    own = "{%- set conversation = messages -%}" + Path(template).read_text() + "{%- set messages = conversation -%}"
    copy.write_text(own + scripts + otherwise)
    return str(copy)


def as_cairn_takes(model, args):
    """The checkpoint's folder and the flags: as written, but for what only vLLM's model has, LoRA, and flags unknown
    here. Returns those left out as well."""
    groups = []
    for arg in map(str, args):
        if re.match(r"--?[a-z]", arg):
            groups.append(arg.split("=", 1) if "=" in arg else [arg])
        elif groups:
            groups[-1].append(arg)
    kept, left_out = [], []
    for flag, *values in groups:
        dashed = "--" + flag.lstrip("-").replace("_", "-") if flag.startswith("--") else flag
        allowed = ALLOWED.get(dashed)
        if dashed == "--tool-call-parser":
            kept += [flag, CALLS]
            left_out += [] if values == [CALLS] else [[flag, *values]]
        elif flag in NOT_CAIRNS:
            pytest.skip(NOT_CAIRNS[flag])
        elif dashed == "--chat-template" and Path(values[0]).is_file():
            kept += [flag, with_scripts(values[0], model)]
        elif flag == "--model":
            model = values[0]
        elif dashed == "--max-model-len":
            kept += [flag, CONTEXT.get(values[0], values[0])]
        elif flag in OTHER_MODEL | LORA or (allowed is not None and values[0] not in allowed):
            left_out.append([flag, *values])
        elif dashed in known_flags() or dashed.replace("--no-", "--") in known_flags():
            kept += [flag, *values]
        else:
            left_out.append([flag, *values])
    return model, kept, left_out


class RemoteOpenAIServer:
    """vLLM's name: a server with the flags of a vLLM command, and clients of it."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True, max_wait_seconds=None,
                 override_hf_configs=None):  # fmt: skip
        model, args, left_out = as_cairn_takes(model, vllm_serve_args)
        self.show_hidden_metrics = any("--show-hidden-metrics-for-version" in arg for arg in vllm_serve_args)
        self.host, self.port = "127.0.0.1", free_port()
        for flag in ("--port", "-p"):
            if flag in args:
                self.port = int(args[args.index(flag) + 1])
                del args[args.index(flag) : args.index(flag) + 2]
        if "--host" in args:
            del args[args.index("--host") : args.index("--host") + 2]
        if WITHOUT_CACHE.search(model):
            args.append("--no-enable-prefix-caching")
        if "--enable-prompt-tokens-details" not in args:
            args.append("--no-enable-prompt-tokens-details")
        if not {"--served-model-name", "--served_model_name"} & set(args):
            args += ["--served-model-name", model]
        command = [os.environ["CAIRN"], "serve", checkpoint_for(model), *args, *ALWAYS, "--port", str(self.port)]
        self.log = Path(os.environ["BED_LOGS"]) / f"{os.getpid()}-{self.port}.log"
        with open(self.log, "w") as log:
            print(json.dumps({"command": command, "left_out": left_out}), file=log, flush=True)
            keys = {"VLLM_API_KEY": "CAIRN_API_KEY"}
            env = os.environ | {keys[k]: v for k, v in (env_dict or {}).items() if k in keys}
            self.proc = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True, preexec_fn=end_with_parent
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self):
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end:
            if self.proc.poll() is not None:
                lines = self.log.read_text().splitlines()
                raise RuntimeError(f"cairn serve ended with {self.proc.returncode}: {lines[-1][:400]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url_for("health"), timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("cairn serve was not ready in time")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.proc.terminate()
        try:
            self.proc.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.proc.pid, signal.SIGKILL)
            self.proc.wait(10)

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def get_client(self, **kwargs):
        import openai

        return openai.OpenAI(**self._for_client("/v1", kwargs))

    def get_async_client(self, **kwargs):
        import openai

        return openai.AsyncOpenAI(**self._for_client("/v1", kwargs))

    def get_client_anthropic(self, **kwargs):
        import anthropic

        return anthropic.Anthropic(**self._for_client("", kwargs))

    def get_async_client_anthropic(self, **kwargs):
        import anthropic

        return anthropic.AsyncAnthropic(**self._for_client("", kwargs))

    def _for_client(self, path, kwargs):
        return {"base_url": self.url_root + path, "api_key": self.DUMMY_API_KEY, "max_retries": 0,
                "timeout": 240} | kwargs  # fmt: skip


def tests_utils():
    module = StandInModule("tests.utils")
    module.RemoteOpenAIServer = RemoteOpenAIServer
    module.VLLM_PATH = Path.cwd()
    module.ROCM_EXTRA_ARGS = []
    module.ROCM_ENGINE_KWARGS = {}
    for mark in ("large_gpu_mark", "multi_gpu_test", "large_gpu_test", "multi_gpu_only", "single_gpu_only"):
        setattr(module, mark, lambda *args, **kwargs: pytest.mark.skip(reason="needs a GPU"))
    module.requires_fp8 = pytest.mark.skip(reason="needs a GPU")
    module.create_new_process_for_each_test = lambda *args: lambda function: function
    return module


packages = {"vllm"} | ({"torch"} if importlib.util.find_spec("torch") is None else set())
sys.meta_path.insert(0, Finder(packages))
sys.modules["tests.utils"] = tests_utils()
load_from_bed(transformers.AutoTokenizer)
transformers.AutoProcessor = Processor
sys.modules["tests.conftest"] = StandInModule("tests.conftest")


@pytest.fixture(scope="session")
def local_asset_server():
    return ImageServer()


@pytest.fixture
def image_url(request, local_asset_server):
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request, local_asset_server):
    return [local_asset_server.url_for(name) for name in request.param]


def uses_server(item):
    """Whether a test or one of its fixtures speaks of a server that this plugin starts."""
    names = set()

    def names_of(code):
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names_of(constant)

    functions = [item.function]
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        functions += [definition.func for definition in definitions]
    for function in functions:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if hasattr(function, "__code__"):
            names_of(function.__code__)
    if {"get_async_client", "get_client"} & names:
        return True
    return any(name.startswith("Remote") and name.endswith(("Server", "ServerCustom")) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    asked.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or not report.passed:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        if call.excinfo is not None and not report.skipped:
            reason = call.excinfo.exconly()
        row = {
            "test": item.nodeid,
            "outcome": report.outcome if report.when == "call" or report.skipped else "error",
            "asks_server": uses_server(item),
            "asked": sorted(asked),
            "why": reason[:1500],
        }
        if report.when != "teardown":
            with open(os.environ["BED_RESULTS"], "a") as results:
                print(json.dumps(row), file=results)
    return report
