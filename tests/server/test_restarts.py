"""A server that is killed with SIGKILL goes on, started again, from what it had written to its disk."""

from pathlib import Path
from time import sleep

import httpx
import numpy as np
import pytest
from demo.server import running, serve_command

PROMPT = np.random.default_rng(3).integers(20, 4000, 2000).tolist()


def ask(url: str, prompt=PROMPT) -> tuple[str, dict]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False).raise_for_status().json()
    return answer["choices"][0]["text"], answer["cairn"]["cache"]


def written(url: str) -> float:
    """Entries on the disk."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    (line,) = [line for line in lines if line.startswith("cairn:tier_entries{") and 'tier="disk"' in line]
    return float(line.split()[-1])


@pytest.mark.more
@pytest.mark.parametrize("exact", [True, False])
def test_the_first_repeat_after_a_kill_comes_from_the_disk(tiny_model: Path, tmp_path: Path, exact: bool):
    flags = ["--disk-cache", str(tmp_path / "cache"), *(["--exact"] if exact else [])]
    command = serve_command(tiny_model, *flags)
    with running(command, tmp_path / "first.log") as server:
        expected, first = ask(server.url)
        assert first["tier_tokens"] == 0
        # 31 chunks and the state at the prompt's end, and without --exact that at the answer's
        assert any(written(server.url) >= 32 or sleep(0.05) for _ in range(1200))
        server.kill()
    with running(command, tmp_path / "second.log") as server:
        answer, cache = ask(server.url)
        assert (answer, cache["tier_tokens"], cache["cached_tokens"]) == (expected, 2000, 2000)
        view = httpx.get(f"{server.url}/cache", timeout=60, trust_env=False).json()
        assert [(tier["name"], tier["hits"]) for tier in view["tiers"]] == [("disk", 1)]
