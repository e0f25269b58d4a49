"""The benchmark of first starts: its table and its plot, without a server."""

from pathlib import Path

import pytest
from benchmarks import first_start


def test_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "size": "small",
        "machine": "x86_64",
        "tokens": 600,
        "rounds": [{"first": {"seconds": 30.0}, "later": 10.0}, {"first": {"seconds": 20.0}, "later": 8.0}],
        "first_start_seconds": 25.0,
        "later_start_seconds": 9.0,
        "first_over_later": 2.78,
        "first_minute_ttft_seconds": 4.7,
        "later_ttft_seconds": 4.5,
        "first_minute_over_later": 1.044,
    }
    first_start.show(found)
    assert "2.78" in capsys.readouterr().out
    first_start.plot(found, tmp_path / "starts.svg")
    assert "<svg" in (tmp_path / "starts.svg").read_text()
