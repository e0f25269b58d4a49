"""An application below a prefix answers as the one at the root."""

import asyncio

import pytest

from cairn.deploy.ray.route_prefix import RoutePrefix


@pytest.mark.parametrize(
    ("prefix", "path", "expected"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/fleet", "/fleet/v1/models", "/v1/models"),
        ("/fleet", "/fleet/fleet", "/fleet"),
        ("/fleet", "/fleet", "/"),
        ("/fleet", "/v1/models", "/v1/models"),  # what stands in front has taken it off
    ],
)
def test_the_prefix_is_taken_off_once(prefix, path, expected):
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["path"], scope["raw_path"].decode(), scope["root_path"]))

    scope = {"type": "http", "path": path, "raw_path": path.encode(), "root_path": prefix}
    asyncio.run(RoutePrefix(app)(scope, None, None))
    assert seen == [(expected, expected, "")]
    assert scope["path"] == path
