"""The settings of a deployment: those of `cairn serve` for each replica, and what Ray has to know of the fleet."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import SettingsError

from cairn.errors import ConfigError
from cairn.setting_types import Bytes
from cairn.settings.serve import ENV_PREFIX, ServeSettings, read_settings_file, sort_settings
from cairn.settings.sources import VariablesSource, describe_error

_TRANSFERS = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
_WHERE = "application arguments"
_OF_RAY: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("host", "port"), "the address is Ray's: http_options of the config file"),
        **dict.fromkeys(
            ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
            "HTTPS is Ray's or that of what stands in front: http_options of the config file",
        ),
        "root_path": "the prefix of paths is the application's route_prefix",
    }
)
"""Settings of `cairn serve` that have no meaning behind Ray's proxy, and what has."""


class AutoscalingOptions(BaseModel):
    """How the number of servers follows the load. The names are Ray's."""

    min_replicas: int = Field(1, description="fewest servers; 0 for none while nobody asks", ge=0, le=1024)
    max_replicas: int | None = Field(
        None, description="most servers: their number follows the load; num_replicas is not used then", ge=1, le=1024
    )
    target_pressure: float = Field(
        0.7, description="how full servers should be: open requests by max_num_seqs, or pages held", gt=0, le=10
    )
    upscale_delay_s: float = Field(10.0, description="seconds of more load before a server is added", ge=0, le=86400)
    downscale_delay_s: float = Field(
        300.0, description="seconds of less load before a server is taken away", ge=0, le=86400
    )
    look_back_period_s: float = Field(30.0, description="seconds that load is averaged over", gt=0, le=86400)


class RaySettings(ServeSettings, AutoscalingOptions):
    """Everything a deployment can be told. The constructor takes what `load_ray_settings` has found."""

    reads_variables = False

    num_replicas: int = Field(1, description="servers, unless max_replicas lets their number change", ge=1, le=1024)
    num_prefill_replicas: int = Field(
        0, description="servers that compute prompts and hand them over to the others, over NIXL", ge=0, le=1024
    )
    num_ingresses: int = Field(1, description="actors that choose servers and relay answers", ge=1, le=1024)
    num_cpus: float = Field(1.0, description="CPUs that Ray reserves for a server", ge=0, le=1024)
    num_gpus: float = Field(0.0, description="GPUs that Ray reserves for a server", ge=0, le=64)
    memory: Bytes | None = Field(None, description="bytes of memory that Ray reserves for a server")
    max_surge_percent: int = Field(
        0, description="servers that may be added during a rolling update, so that none is missing", ge=0, le=100
    )
    replica_timeout: float = Field(
        60.0, description="seconds a request waits for a server that could take it", gt=0, le=86400
    )
    max_attempts: int = Field(3, description="servers that a request is tried on before its first byte", ge=1, le=64)
    max_open: int = Field(4096, description="most requests at once in an ingress", ge=1, le=65536)

    @model_validator(mode="after")
    def _check_fleet(self) -> "RaySettings":
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas is {self.min_replicas}: at most max_replicas, which is {self.max_replicas}")
        if self.max_replicas is None and "min_replicas" in self.model_fields_set:
            raise ValueError("min_replicas has no effect without max_replicas: name both, or num_replicas alone")
        for name, why in _OF_RAY.items():
            if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect here: {why}")
        return self

    def with_transfers(self) -> "RaySettings":
        """Handing prompts over, where there are prefill replicas."""
        if not self.num_prefill_replicas or self.kv_transfer_config is not None:
            return self
        return self.model_copy(update={"kv_transfer_config": _TRANSFERS})

    def as_arguments(self) -> dict[str, Any]:
        """What was set, in plain values: `load_ray_settings` of them is the same again, wherever no file is."""
        return self.model_dump(mode="json", include=self.model_fields_set - {"config"})


def load_ray_settings(args: Mapping[str, Any]) -> RaySettings:
    """Settings from an application's arguments, named with dashes or underscores. They win over environment variables
    (CAIRN_...), those over the YAML file `config`, that over the defaults. Raises ConfigError with one line that names
    the setting that is wrong and says what it takes."""
    given = {str(key).replace("-", "_"): value for key, value in args.items()}
    path = given.pop("config", None) or os.environ.get(f"{ENV_PREFIX}CONFIG")
    from_file, of_file = read_settings_file(Path(str(path)), RaySettings) if path else ({}, [])
    values, ignored = sort_settings(given, RaySettings, _WHERE)
    try:
        settings = RaySettings(**from_file | VariablesSource(RaySettings)() | values)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(_describe(error, values, f"--config {path}")) from None
    if not settings.model:
        raise ConfigError(
            f"{_WHERE}: model is missing: name a checkpoint's folder, or its name on the Hugging Face Hub"
        )
    settings._without_effect = tuple(dict.fromkeys([*of_file, *ignored]))
    return settings


def _describe(error: ValidationError, values: Mapping[str, Any], file: str) -> str:
    first = error.errors()[0]
    if not first["loc"]:
        return f"{_WHERE}: {first['msg'].removeprefix('Value error, ')}"
    text = describe_error(error, ENV_PREFIX, values, file)
    return f"{_WHERE}: {text}" if first["loc"][0] in values else text
