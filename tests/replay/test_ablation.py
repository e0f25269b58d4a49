"""The ablation of the eviction policy, and the baseline beside it, on a trace that is made here."""

import gzip
import json
import sys

import numpy as np
import pytest
from benchmarks import ablation
from benchmarks.gdsf import DecayedFrequency
from test_learning import live

from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.divergence import DivergenceStats
from cairn.cache.eviction import RERANK_AGE, LeastRecentlyUsed, ValuePerByte
from cairn.cache.hazard import HazardTable
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
    policy = ablation.cache_policy("-ages-young").eviction
    assert isinstance(policy.table, ablation.WithoutAges) and isinstance(policy, ablation.WithoutYoung)
    assert not isinstance(policy, ablation.WithoutGhosts)
    for name in ("-gittins-ages", "-ages-neighbours-gittins"):
        assert isinstance(ablation.cache_policy(name).eviction.table, ablation.WithoutAges)
    policy = ablation.cache_policy("all").eviction
    assert type(policy) is ValuePerByte and type(policy.table) is HazardTable
    assert type(ablation.cache_policy("lru").eviction) is LeastRecentlyUsed
    assert ablation.cache_policy("gdsf:256").eviction._half_life == 256
    with pytest.raises(SystemExit, match="'bogus', not one of ages"):
        ablation.cache_policy("-ages-bogus")


def test_without_ages_a_class_has_one_rate():
    ages, none = HazardTable(), ablation.WithoutAges()
    for table in (ages, none):
        live(table, [((1,), 100, True)] * 100)
    assert len({none.index(1, age) for age in (0, 50, 100, 5000)}) == 1
    assert none.index(1, 0) == pytest.approx(0.01, rel=0.1)
    assert len({ages.index(1, age) for age in (0, 50, 100, 5000)}) == 4


def test_without_the_index_the_present_rate_counts():
    table = ablation.WithoutGittins()
    live(table, [((1,), 100, True)] * 200)
    assert table.index(1, 10) < table.index(1, 90) / 10, "nothing happens before age 100"


def test_without_neighbours_an_age_counts_for_itself():
    near, alone = HazardTable(), ablation.WithoutNeighbours()
    for table in (near, alone):
        live(table, [((1,), 100, True)] * 40 + [((1,), 2000, False)])
    assert alone.index(1, 150) < near.index(1, 150) / 4


def kept_checkpoints(policy, num_nodes, turn=0):
    """Checkpoints at the ends of a path of so many nodes, which the policy knows; the deepest one last."""
    policy.start(0, DivergenceStats())
    nodes = [Node(None, b"", 0, 0)]
    for number in range(num_nodes):
        nodes.append(Node(nodes[-1], bytes(8), number, number + 1))
        nodes[-2].adopt(nodes[-1])
        nodes[-1].checkpoint = Checkpoint(nodes[-1], np.empty(0, np.int32), Kind.PROMPT_END, Origin.GRID, "r")
        policy.add(nodes[-1].checkpoint, Lineage(turn, 0, 1000))
    return [node.checkpoint for node in nodes[1:]]


def drop(policy, checkpoint):
    checkpoint.node.checkpoint = None
    policy.drop(checkpoint)


def test_without_ghosts_there_are_none():
    for name, num_records in (("-ghosts", 0), ("all", 1)):
        policy = ablation.cache_policy(name).eviction
        drop(policy, *kept_checkpoints(policy, 1))
        assert len(policy.records()) == num_records


def test_without_lineage_a_class_does_not_know_it():
    for name, key in (("-lineage", (0, 0, 0)), ("all", (0, 2, 1))):
        policy = ablation.cache_policy(name).eviction
        (checkpoint,) = kept_checkpoints(policy, 1, turn=2)
        assert policy._records[checkpoint.node].class_key() == (Kind.PROMPT_END.number, *key)


def test_without_inheritance_the_one_above_gains_nothing():
    for name, gains in (("-inheritance", False), ("all", True)):
        policy = ablation.cache_policy(name).eviction
        above, deepest = kept_checkpoints(policy, 2)
        before = policy.chance(above.node)
        drop(policy, deepest)
        assert (policy.chance(above.node) > before) is gains


def test_without_young_only_the_regular_ranking_is_left():
    for name, ranked in (("-young", 0), ("all", 1)):
        policy = ablation.cache_policy(name).eviction
        kept_checkpoints(policy, 1)
        assert policy.refresh(()) == []
        for _ in range(RERANK_AGE):
            policy.begin_request(None, Lineage(), None)
        policy._rank_at = 2 * RERANK_AGE
        assert len(policy.refresh(())) == ranked


def test_without_the_grid_no_predicted_position_is_kept():
    facts = PromptFacts(1000, 0, 0, predicted={320: 1.0})
    for name, kept in (("all", True), ("-grid", False)):
        wanted = ablation.cache_policy(name).placement.in_prefill(facts, 0, 1000)
        assert any(want.kind is Kind.GRID for want in wanted) is kept


def test_without_what_recurs_only_the_grid_is_chosen_from():
    facts = PromptFacts(1000, 0, 0, recurring=(333,))
    for name, chosen_from in (("all", True), ("-recurring", False)):
        _, others = ablation.cache_policy(name).placement.candidates(facts)
        assert (333 in others) is chosen_from and 320 in others


def test_without_answers_none_of_their_positions_is_kept():
    facts = PromptFacts(1000, 0, 0, answer_worth=1.0)
    kept = {name: ablation.cache_policy(name).placement for name in ("all", "-answers")}
    assert kept["all"].in_decode(facts, 1024) is not None and kept["-answers"].in_decode(facts, 1024) is None
    assert kept["all"].decode_stride == 64 and kept["-answers"].decode_stride == 0, "a decode step is not even asked"


def test_frequencies_decay():
    policy = DecayedFrequency(half_life=10)
    old, new = (Checkpoint(Node(None, b"", 0, 0), np.empty(0, np.int32), Kind.GRID, Origin.GRID, "r") for _ in range(2))

    def wait(requests):
        for _ in range(requests):
            policy.begin_request(None, Lineage(), None)

    policy.add(old, Lineage())
    for _ in range(3):
        policy.checkpoint_used(old)
    wait(10)
    policy.add(new, Lineage())
    assert policy.priority(old, 100, 10) == pytest.approx(policy.priority(new, 100, 10) + 1), "four uses count as two"
    wait(10)
    policy.checkpoint_used(new)
    assert policy.priority(new, 100, 10) > policy.priority(old, 100, 10), "one and a half against one"
    assert policy.priority(new, 200, 10) == pytest.approx(policy.priority(new, 100, 10) + 1)
    policy.drop(old)
    policy.add(old, Lineage())
    assert policy.priority(old, 100, 10) < policy.priority(new, 100, 10), "what was dropped is forgotten"
