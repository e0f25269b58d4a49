"""The benchmark of Ray Serve against a server that streams by rote, without Ray."""

import asyncio

import pytest
from benchmarks.ray_overhead import ALONE, RAY, Answer, Load, Way, added_ms, ask, figures, parse, plot, throughput_ratio

USAGE = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n'


def serve(answer, call):
    """`call(url)` while a server sends `answer` to everybody who asks."""

    async def run():
        async def on_client(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(on_client, "127.0.0.1", 0)
        async with server:
            return await call(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(run())


def stream(chunks, tokens):
    return b'data: {"choices":[{"text":"a"}]}\n\n' * chunks + USAGE % tokens


def test_every_client_gets_every_answer_whole():
    load = Load(clients=3, requests=2, tokens=7, step=0.001, burst=True)
    answers = serve(stream(5, 7), lambda url: load.run(url, 0))
    assert [(answer.tokens, answer.chunks) for answer in answers] == [(7, 5)] * 6
    assert all(answer.ttft > 0 for answer in answers)


def test_answers_are_of_many_lengths_unless_they_come_in_bursts(monkeypatch):
    asked = []

    async def take(url, prompt, tokens):
        asked.append(tokens)
        return Answer(0.0, tokens, tokens)

    monkeypatch.setattr("benchmarks.ray_overhead.ask", take)
    asyncio.run(Load(clients=20, requests=5, tokens=50, step=0).run("", 0))
    assert len(set(asked)) > 20
    assert 25 <= min(asked) <= max(asked) <= 75
    assert abs(sum(asked) / len(asked) - 50) < 5


@pytest.mark.parametrize("answer", [stream(5, 6), stream(5, 7).removesuffix(b"data: [DONE]\n\n"), b"", b'{"error":1}'])
def test_an_answer_that_is_not_whole_is_an_error(answer):
    with pytest.raises(RuntimeError):
        serve(answer, lambda url: ask(url, [20], 7))


def ways():
    alone, ray = (Way(name, "http://x", dict) for name in (ALONE, RAY))
    alone.answers = [Answer(0.030, 50, 50), Answer(0.040, 50, 40)] * 5
    ray.answers = [Answer(0.035, 50, 50), Answer(0.045, 50, 50)] * 5
    alone.rates, ray.rates = [100.0, 200.0, 50.0], [90.0, 160.0, 50.0]
    alone.used, ray.used = {"server": 0.0045}, {"proxy": 0.001, "core": 0.001}
    return [alone, ray]


def test_figures_are_differences_and_ratios_of_rounds(tmp_path):
    found = figures(ways())
    assert added_ms(ways(), 0.5) == pytest.approx(5.0) and found["added_ttft_ms"]["p50"] == pytest.approx(5.0)
    assert throughput_ratio(ways()) == pytest.approx(0.9)
    assert found["ways"][ALONE]["processor_us_a_chunk"] == {"server": pytest.approx(10.0)}
    assert found["ways"][ALONE]["tokens_a_chunk"] == pytest.approx(500 / 450)
    plot(ways(), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1_000


@pytest.mark.parametrize("words", [["--clients", "0"], ["--rounds", "-1"], ["--tokens", "x"]])
def test_bad_flags_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2 and words[0] in capsys.readouterr().err
