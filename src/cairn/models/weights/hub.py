"""Find a checkpoint by MODEL: a folder, a GGUF file, or a name on the Hugging Face Hub, which is downloaded.

A folder takes precedence over a repository of the same name. Of a repository only the files that cairn reads are
downloaded, into the cache that other programs share; nothing of it is executed. huggingface_hub does the downloading:
it skips files that are complete, and resumes a broken transfer up to five times in a row.
"""

import errno
import glob
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import (
    HfApi,
    ResolvedRevision,
    constants,
    get_cached_repo_tree,
    get_session,
    get_token,
    is_offline_mode,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import disable_progress_bars, validate_repo_id  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as library_logging

from cairn import __version__
from cairn.errors import CairnError, ConfigError, DownloadError, ModelError
from cairn.models.families import family_of
from cairn.models.weights.gguf.checkpoint import open_gguf
from cairn.models.weights.gguf.header import is_gguf
from cairn.models.weights.tensor_headers import INDEX, SINGLE, TensorHeader, indexed_files, indexed_headers, read_json

logger = logging.getLogger("cairn.hub")

_EXAMPLE = "Qwen/Qwen3.5-4B"
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SMALL_FILES = (
    _CONFIG,
    "generation_config.json",
    "hf_quant_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    INDEX,
    *_TOKENIZER_FILES,
)
_MAX_NAME = 256
_MOST_SWEEPS = 100
"""Looks after partial files, at the end."""
_REVISION = re.compile(r"[\w.][\w./+-]{0,254}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `name`: a folder, a GGUF file, or a name on the hub. `revision`: a branch, tag or
    commit of the latter. `download_dir`: the cache, instead of huggingface_hub's default. `flag`: the name's name in
    errors."""

    name: str
    revision: str | None = None
    download_dir: Path | None = None
    flag: str = "MODEL"

    def __str__(self) -> str:
        return f"{self.flag} {self.name[:_MAX_NAME]}"


def check_source(source: ModelSource) -> None:
    """Refuse what is neither the folder of a checkpoint nor a name on the hub, which nobody is asked about. Raises
    ConfigError."""
    folder = _local_folder(source)
    if folder is not None:
        family_of(open_gguf(folder).config if is_gguf(folder) else read_json(folder / _CONFIG))


def find_checkpoint(source: ModelSource) -> Path:
    """The folder with everything that serving reads.

    Raises ConfigError or ModelError when name, revision or content are wrong, DownloadError when downloading failed.
    """
    folder = _local_folder(source)
    if folder is not None:
        return folder
    with _explained(source):
        repository = _Repository(source)
        return repository.fetch_weights(repository.fetch_config(needs_tokenizer=True))


def find_headers(source: ModelSource) -> tuple[Path, dict[str, TensorHeader] | None]:
    """The folder with the configuration, and the headers of the tensors unless their files are in it.

    Raises as `find_checkpoint`.
    """
    folder = _local_folder(source)
    if folder is not None:
        return folder, None
    with _explained(source):
        repository = _Repository(source)
        folder = repository.fetch_config(needs_tokenizer=False)
        if all((folder / file).is_file() for file in weight_files(folder)):
            return folder, None
        return folder, repository.fetch_headers(folder)


def find_tokenizer(source: ModelSource) -> Path:
    """The folder with tokenizer.json, or that file. Raises as `find_checkpoint`."""
    if os.path.isfile(source.name):
        return Path(source.name)
    folder = _local_folder(source)
    if folder is not None:
        return folder
    with _explained(source):
        repository = _Repository(source)
        folder = repository.fetch(_TOKENIZER_FILES)
        repository.require(folder, _TOKENIZER)
        return folder


def weight_files(folder: Path) -> list[str]:
    """The safetensors files that hold a checkpoint's tensors: what its index names, where it has one."""
    return indexed_files(folder) if (folder / INDEX).exists() else [SINGLE]


def _local_folder(source: ModelSource) -> Path | None:
    """A folder, or a GGUF file; None for a name on the hub. Raises ConfigError for what is neither."""
    # os.path says no where pathlib raises: a name that is too long, or in a folder that cannot be entered
    named_gguf = is_gguf(Path(source.name))
    if os.path.isdir(source.name) or (named_gguf and os.path.isfile(source.name)):
        if source.revision is not None:
            logger.warning("--revision has no effect: %s is on this machine", source)
        return Path(source.name)
    if os.path.exists(source.name):
        raise ConfigError(f"{source} is a file: name the folder that it is in, or a .gguf file")
    if named_gguf:
        raise ConfigError(f"{source}: there is no such file")
    try:
        validate_repo_id(source.name)
    except HFValidationError:
        raise ConfigError(
            f"{source}: there is no such folder, and names on the Hugging Face Hub look like {_EXAMPLE}"
        ) from None
    if source.revision is not None and (not _REVISION.fullmatch(source.revision) or ".." in source.revision):
        raise ConfigError(f"--revision {source.revision[:_MAX_NAME]!r}: must be a branch, a tag or a commit")
    return None


class _Repository:
    """One commit of a repository on the hub, and its files in the cache."""

    def __init__(self, source: ModelSource) -> None:
        _limit_requests()
        # The library has a handler of its own.
        library_logging.disable_propagation()
        if not sys.stderr.isatty():
            disable_progress_bars()
        self._source = source
        self._cache = source.download_dir or Path(constants.HF_HUB_CACHE)
        self._api = HfApi(library_name="cairn", library_version=__version__)
        self._commit = self._resolve()
        if not _COMMIT.fullmatch(self._commit.resolved):
            raise DownloadError(f"{source}: {_endpoint()} gave no commit: check HF_ENDPOINT")

    def _resolve(self) -> ResolvedRevision:
        """The revision's commit by the hub, or where that does not answer the last one that is cached."""
        try:
            return self._resolve_at(local_files_only=is_offline_mode())
        except RevisionNotFoundError:
            raise
        except HfHubHTTPError as error:
            try:
                cached = self._resolve_at(local_files_only=True)
            except RevisionResolutionError:
                raise error from None
            logger.warning("%s; what is cached of it is used", _explain(self._source, error))
            return cached

    def _resolve_at(self, *, local_files_only: bool) -> ResolvedRevision:
        return self._api.resolve_revision(
            self._source.name,
            revision=self._source.revision,
            cache_dir=self._cache,
            local_files_only=local_files_only,
        )

    def fetch(self, files: Sequence[str]) -> Path:
        """Download those of the files that the repository has in its top folder; returns the commit's folder."""
        with _ended_by_signals():
            return Path(
                snapshot_download(
                    self._source.name,
                    revision=self._commit,
                    cache_dir=self._cache,
                    library_name="cairn",
                    library_version=__version__,
                    allow_patterns=[glob.escape(file) for file in files],
                )
            )

    def fetch_config(self, *, needs_tokenizer: bool) -> Path:
        """Download everything but weights, and refuse what cannot be served before its weights are downloaded."""
        folder = self.fetch(_SMALL_FILES)
        self.require(folder, _CONFIG)
        family_of(read_json(folder / _CONFIG))
        if needs_tokenizer:
            self.require(folder, _TOKENIZER)
        return folder

    def fetch_weights(self, folder: Path) -> Path:
        files = weight_files(folder)
        self._check_weights(folder, files)
        self._check_disk(folder, files)
        self.fetch(files)
        for file in files:
            self.require(folder, file)
        return folder

    def fetch_headers(self, folder: Path) -> dict[str, TensorHeader]:
        """The headers of all tensors, without their data."""
        self._check_weights(folder, weight_files(folder))
        if (folder / INDEX).exists():
            return indexed_headers(folder, self._file_headers)
        return self._file_headers(SINGLE)

    def _file_headers(self, file: str) -> dict[str, TensorHeader]:
        try:
            metadata = self._api.parse_safetensors_file_metadata(
                self._source.name, file, revision=self._commit.resolved
            )
            headers = {
                name: TensorHeader(tuple(tensor.shape), str(tensor.dtype), file)
                for name, tensor in metadata.tensors.items()
            }
        # The library raises AttributeError and TypeError for JSON of another form.
        except (SafetensorsParsingError, AttributeError, TypeError) as error:
            raise ModelError(f"{self._source}: {file} is no safetensors file: {_first_line(error)}") from error
        for name, header in headers.items():
            if not all(isinstance(size, int) and size >= 0 for size in header.shape):
                raise ModelError(f"{self._source}: {file} has a shape of {name} that is none")
        return headers

    def require(self, folder: Path, file: str) -> None:
        """Raises ModelError when the file is not there."""
        if not (folder / file).is_file():
            raise ModelError(f"{self._source}: the repository has no {file}{self._at()}")

    def _check_weights(self, folder: Path, files: Sequence[str]) -> None:
        """Raises ModelError when the repository lacks one of its weight files."""
        sizes = self._sizes()
        missing = [file for file in files if file not in sizes and not (folder / file).is_file()]
        # A cache that another program has filled may not have the list of the repository's files: see `require`.
        if not missing or not sizes:
            return
        if missing != [SINGLE]:
            raise ModelError(f"{self._source}: {INDEX} names {missing[0]}, which the repository has not{self._at()}")
        pickles = sorted(file for file in sizes if file.endswith((".bin", ".pt", ".pth")))
        instead = f"; {pickles[0]} is a pickle, which could run code, and is not read" if pickles else ""
        raise ModelError(
            f"{self._source}: the repository has neither {SINGLE} nor {INDEX}{self._at()}: "
            f"choose one with safetensors{instead}"
        )

    def _check_disk(self, folder: Path, files: Sequence[str]) -> None:
        """Raises DownloadError when the files do not fit on the disk."""
        sizes = self._sizes()
        needed = sum(sizes.get(file, 0) for file in files if not (folder / file).is_file())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise DownloadError(
                f"{self._source}: {_gib(needed)} are to be fetched into {self._cache}, where {_gib(free)} are free: "
                "make room, or name another place with --download-dir or HF_HUB_CACHE"
            )

    def _sizes(self) -> Mapping[str, int]:
        """The repository's files with their bytes; empty where the cache has no list of them."""
        try:
            tree = get_cached_repo_tree(self._source.name, revision=self._commit, cache_dir=self._cache)
        except CachedRepoTreeNotFoundError:
            return {}
        return {file.path: file.size for file in tree}

    def _at(self) -> str:
        return "" if self._source.revision is None else f" at --revision {self._source.revision}"


# -- requests ----------------------------------------------------------------------------------------------------------


def _limit_requests() -> None:
    """Give every request of huggingface_hub a deadline: those for commits and lists of files have none."""
    hooks = get_session().event_hooks["request"]
    if _limit not in hooks:
        limited = {"request": [*hooks, _limit]}
        # The hub is reached by proxies of the environment and by redirects to other hosts.
        set_client_factory(lambda: httpx2.Client(event_hooks=limited, follow_redirects=True))


def _limit(request: httpx2.Request) -> None:
    timeouts = request.extensions.get("timeout") or {}
    if not timeouts or None in timeouts.values():
        request.extensions["timeout"] = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT).as_dict()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the process at once. An exception would wait for the downloading threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unlink_partial_files() -> int:
    """How many of this process's open files were partial ones."""
    num_files = 0
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                if path.endswith(".incomplete"):
                    num_files += 1
                    os.unlink(path)
    return num_files


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # Partial files have random names, so no later start would resume them. Those open here are this process's own.
    # Downloading threads go on meanwhile and may open another, so it is looked twice where there were none.
    num_clean = 0
    for _ in range(_MOST_SWEEPS):
        num_clean = 0 if _unlink_partial_files() else num_clean + 1
        if num_clean == 2:
            break
    os._exit(128 + number)


# -- errors ------------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(source: ModelSource) -> Iterator[None]:
    """Turn the library's errors into one line that names what to change."""
    try:
        yield
    except CairnError:
        raise
    # ValueError: a response that cannot be read; RuntimeError: raised by Xet's transfers.
    except (OSError, httpx2.HTTPError, httpx2.InvalidURL, RevisionResolutionError, ValueError, RuntimeError) as error:
        raise _explain(source, error) from error


def _explain(source: ModelSource, error: Exception) -> CairnError:
    match error:
        case GatedRepoError():
            return ConfigError(
                f"{source}: access is restricted: ask for it at {_endpoint()}/{source.name}, and give a token that has "
                f"it in HF_TOKEN ({_token()})"
            )
        case RevisionNotFoundError():
            return ConfigError(
                f"--revision {source.revision or 'main'}: {source.name} has no such branch, tag or commit"
            )
        case RepositoryNotFoundError():
            return ConfigError(
                f"{source}: there is no such folder, and no such repository at {_endpoint()} or none that you may see: "
                f"check the name, which looks like {_EXAMPLE}; a private one needs a token in HF_TOKEN ({_token()})"
            )
        case HfHubHTTPError():
            return _explain_status(source, error.response.status_code)
        case RevisionResolutionError() | LocalEntryNotFoundError() | OfflineModeIsEnabled() if is_offline_mode():
            where = source.download_dir or constants.HF_HUB_CACHE
            return ConfigError(
                f"{source}: there is no such folder, no complete copy in {where}, and HF_HUB_OFFLINE forbids to fetch "
                "one: unset that, or name the right --download-dir, HF_HUB_CACHE or HF_HOME"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return DownloadError(
                f"{source}: the disk is full: make room, or name another place with --download-dir or HF_HUB_CACHE"
            )
        case PermissionError() | OSError(errno=errno.EROFS | errno.ENOTDIR):
            return ConfigError(
                f"{source}: cannot be kept ({_first_line(error)}): name another --download-dir or HF_HUB_CACHE"
            )
    reason = error.__cause__ if isinstance(error, (RevisionResolutionError, LocalEntryNotFoundError)) else None
    if isinstance(reason, HfHubHTTPError):
        return _explain(source, reason)
    return DownloadError(
        f"{source}: there is no such folder, and it could not be fetched from {_endpoint()} "
        f"({_first_line(reason or error)}): check the network, HTTPS_PROXY and HF_ENDPOINT; what has come is kept"
    )


def _explain_status(source: ModelSource, status: int) -> CairnError:
    if status in (401, 403):
        return ConfigError(f"{source}: {_endpoint()} answers {status}: check the token in HF_TOKEN ({_token()})")
    if status == 429:
        return DownloadError(f"{source}: {_endpoint()} answers 429, too many requests: try later, or with HF_TOKEN set")
    return DownloadError(f"{source}: {_endpoint()} answers {status}: try later, or check HF_ENDPOINT")


def _token() -> str:
    return "there is none" if get_token() is None else "there is one"


def _endpoint() -> str:
    """The hub's address, without a password that may be in it."""
    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_MAX_NAME] if lines else type(error).__name__


def _gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"
