"""The ablation of the eviction policy, and the baseline beside it, on a trace that is made here."""

import gzip
import json
import sys

import numpy as np
import pytest
from benchmarks import ablation
from benchmarks.gdsf import DecayedFrequency

from cairn.cache.checkpoint import NO_LINEAGE, Kind, Origin
from cairn.cache.eviction import CheckpointFacts, LeastRecentlyUsed, PolicyParts, ValuePerByte
from cairn.cache.placement import PromptFacts
from cairn.cache.tree import Checkpoint, Node


@pytest.fixture
def folder(tmp_path):
    """A trace in which a few documents are asked about again and again, among prompts that come once."""
    rows, rng = [], np.random.default_rng(0)
    for number in range(120):
        document = int(rng.integers(4))
        blocks = [[1000 * document, 40], [100_000 + number, 1]] if number % 3 else [[200_000 + 100 * number, 40]]
        rows.append({"t": float(number), "s": number, "in": 41 * 64, "out": 1, "v": 0, "h": blocks})
    head = {"name": "made", "unit": 64, "n": len(rows), "source": "", "license": "", "real": False, "note": ""}
    with gzip.open(tmp_path / "made.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in [head, *rows])
    return tmp_path


def test_rows_are_kept_and_told_over_the_offline_line(folder, monkeypatch, capsys):
    out, computed = folder / "rows.json", []
    replayed = ablation.replayed
    monkeypatch.setattr(ablation, "replayed", lambda *of: computed.append(of[-1]) or replayed(*of))
    command = ["ablation", str(folder), "--shares", "0.1", "--json", str(out)]
    for names in ("all,-ages-lineage", "offline,all,gdsf,lru"):
        monkeypatch.setattr(sys, "argv", [*command, f"--policies={names}"])
        ablation.main()
    assert computed == ["all", "-ages-lineage", "offline", "gdsf", "lru"], "what is there already is not computed again"
    rows = {row["policy"]: row["token_hit_rate"] for row in json.loads(out.read_text())}
    assert 0 < rows["lru"] <= rows["all"] <= rows["offline"] < 1
    found = ablation.ratios(json.loads(out.read_text()))
    assert found["all", 0.1] == {"made": rows["all"] / rows["offline"]} and ("offline", 0.1) not in found
    assert "hit/offline at 10%" in capsys.readouterr().out


def test_names_mean_policies():
    parts = ablation.cache_policy("-ages-young").eviction.parts
    assert parts == PolicyParts(ages=False, young=False)
    assert ablation.cache_policy("all").eviction.parts == PolicyParts()
    assert type(ablation.cache_policy("all").eviction) is ValuePerByte
    assert type(ablation.cache_policy("lru").eviction) is LeastRecentlyUsed
    assert ablation.cache_policy("gdsf:256").eviction._half_life == 256
    with pytest.raises(SystemExit, match="'bogus', not one of ages"):
        ablation.cache_policy("-ages-bogus")


def test_without_offsets_no_predicted_position_is_kept():
    facts = PromptFacts(1000, 0, 0, 0, predicted=(320,))
    for name, kept in (("all", True), ("-offsets", False)):
        wanted = ablation.cache_policy(name).placement.in_prefill(facts, 0, 1000)
        assert any(want.kind is Kind.OFFSET for want in wanted) is kept


def test_frequencies_decay():
    policy = DecayedFrequency(half_life=10)
    old, new = (Checkpoint(Node(None, b"", 0, 0), np.empty(0, np.int32), Kind.GRID, Origin.GRID, "r") for _ in range(2))
    facts = CheckpointFacts(Kind.PROMPT_END, 100, 10, 0, 0)

    def wait(requests):
        for _ in range(requests):
            policy.begin_request(None, 0)

    policy.add(old, NO_LINEAGE)
    for _ in range(3):
        policy.use(old)
    wait(10)
    policy.add(new, NO_LINEAGE)
    assert policy.priority(old, facts) == pytest.approx(policy.priority(new, facts) + 1), "four uses count as two"
    wait(10)
    policy.use(new)
    assert policy.priority(new, facts) > policy.priority(old, facts), "one and a half against one"
    assert policy.priority(new, facts._replace(saved_tokens=200)) == pytest.approx(policy.priority(new, facts) + 1)
    policy.drop(old)
    policy.add(old, NO_LINEAGE)
    assert policy.priority(old, facts) < policy.priority(new, facts), "what was dropped is forgotten"
