import pytest
from demo.__main__ import main


@pytest.mark.timeout(120)
def test_a_server_that_cannot_start_fails_the_demo_and_names_its_log(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
    log = tmp_path / "out" / "cairn.log"
    assert "nowhere" in log.read_text()
    error = capsys.readouterr().err
    assert "exit code 2" in error and str(log) in error
