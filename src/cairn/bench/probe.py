"""Whether the server is there, and what it calls its model."""

from collections.abc import Mapping
from typing import Any

import httpx

from cairn.bench.load import Pace
from cairn.errors import CairnError

_TRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.5


async def until_ready(
    http: httpx.AsyncClient, base_url: str, headers: Mapping[str, str], pace: Pace, seconds: float
) -> None:
    """Return once the server answers /v1/models, with whatever but 5xx. Raises CairnError after `seconds`."""
    deadline = pace.now() + seconds
    while True:
        try:
            response = await http.get(f"{base_url}/v1/models", headers=dict(headers), timeout=_TRY_SECONDS)
            if response.status_code < 500:
                return
            said = f"HTTP {response.status_code}"
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
        if pace.now() + _PAUSE_SECONDS > deadline:
            raise CairnError(f"{base_url} was not ready within {seconds:g} s: {said}")
        await pace.until(pace.now() + _PAUSE_SECONDS)


async def first_model(http: httpx.AsyncClient, base_url: str, headers: Mapping[str, str]) -> str:
    """The first model of /v1/models. Raises CairnError that says what to do."""
    url = f"{base_url}/v1/models"
    try:
        response = await http.get(url, headers=dict(headers), timeout=_TRY_SECONDS)
        name = _first_name(response.json()) if response.status_code == 200 else None
        said = f"HTTP {response.status_code}"
    except (httpx.HTTPError, ValueError) as error:
        name, said = None, str(error) or type(error).__name__
    if name is None:
        raise CairnError(f"{url} names no model ({said}): is the server there? Name its model with --model")
    return name


def _first_name(listed: Any) -> str | None:
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        return None
    name = models[0].get("id")
    return name if isinstance(name, str) else None
