import json

import pytest
from demo.client import Reply
from demo.job import AGAIN, BRANCHED, ONE_TOKEN, Outcome
from demo.samples import Sample
from demo.shared_prefix import Shared

from demo import __main__ as program


@pytest.mark.more
@pytest.mark.timeout(120)
def test_a_server_that_cannot_start_fails_the_demo_and_names_its_log(tmp_path, capsys):
    assert program.main(["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
    log = tmp_path / "out" / "cairn.log"
    assert "nowhere" in log.read_text()
    error = capsys.readouterr().err
    assert "exit code 2" in error and str(log) in error


def outcomes(answer):
    def one(label, cached, passes=1):
        return Outcome("a", label, Shared(200, 200), Reply(tuple(range(200)), answer, "", cached, "none", 0.1, passes))

    return [one(AGAIN, 200), one(ONE_TOKEN, 200, passes=0), one(BRANCHED, 192)]


@pytest.mark.parametrize(("without_cache", "code", "verdict"), [((7, 8), 0, "kept"), ((7, 9), 1, "BROKEN")])
def test_the_exit_code_says_whether_answers_were_identical(tmp_path, monkeypatch, capsys, without_cache, code, verdict):
    answers = dict.fromkeys(program.SERVERS, (7, 8)) | {program.OFF: without_cache}
    written = [Sample("def f():\n", "    return 1")]

    def ask(name, *_):
        return (outcomes(answers[name]), written) if name == program.DEFAULT else outcomes(answers[name])

    monkeypatch.setattr(program, "_ask", ask)
    assert program.main(["--model", "m", "--out", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert f"{verdict}  " in printed and "    return 1" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert [check["kept"] for check in result["checks"]] == [code == 0] + [True] * 7
    assert result["requests"][program.OFF][0]["answer_ids"] == list(without_cache)
    assert result["samples"] == [{"prompt": "def f():\n", "answer": "    return 1"}]
