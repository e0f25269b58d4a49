"""cairn on Ray Serve: `serve run cairn.deploy.ray:app model=MODEL num_replicas=2`. It needs the extra `ray`.

client -> Ray's proxy -> ingress (`relay.RequestRelay`) -> router (`router.PrefixRouter`) -> replica
(`replica.EngineReplica`: an engine with its process, and the server's own application in this one)
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from cairn.errors import ConfigError

__all__ = ["app"]


def app(args: Mapping[str, Any]) -> Any:
    """The Serve application that `serve run` and `serve build` make of their arguments: every setting of `cairn serve`
    but those of its address, and `cairn.deploy.ray.settings.RaySettings`'s own. Raises ConfigError."""
    spec = importlib.util.find_spec("ray")
    # a folder of that name where one stands is no Ray: /tmp has one wherever Ray has run
    if spec is None or spec.origin is None:
        raise ConfigError('Ray Serve is not installed: pip install "cairn-serve[ray]"')
    from cairn.deploy.ray.application import build_application
    from cairn.deploy.ray.settings import load_ray_settings

    return build_application(load_ray_settings(args))
