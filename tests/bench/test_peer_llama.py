"""llama.cpp as a peer: its build, GGUF files, what it has to agree with before it is measured; the machine's bounds.

Its sources are not here: programs in their place say what they were asked.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from benchmarks import machine_bounds, peer_agreement, peer_llama
from benchmarks.machine_bounds import bounds, loops_of
from benchmarks.peer_agreement import ANSWER_TOKENS, LEAST, Agreement, agreement_of, check_agreement
from benchmarks.peer_gguf import gguf_of
from benchmarks.peer_llama import ISAS, NATIVE, PROGRAMS, programs_of, unpack_source
from benchmarks.peer_loads import QUICK
from benchmarks.peer_report import bounds_table_of
from benchmarks.peer_servers import PEERS, Peer, PeerError, Place, command_of, environment_of
from benchmarks.peer_setup import mark_finished
from benchmarks.peers import Comparison, parse
from rich.console import Console

PLACE = Place(Path("model folder"), 8123, 1, 3, gguf=Path("model.gguf"), peers=Path("peers"))
HELD = Path(peer_llama.__file__).parent / "vllm_avx2"
CONVERTER = """
import sys
from conversion.base import TextModel
def main():
    class Model(TextModel):
        pass
    out = sys.argv[sys.argv.index("--outfile") + 1]
    open(out, "w").write(f"{Model().get_vocab_base_pre(None)} {' '.join(sys.argv[2:4])} {sys.argv[-1]}")
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("not recognized")
"""


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


# -- command lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_both_have_weights_of_as_many_bits(quantization):
    place = replace(PLACE, quantization=quantization)
    assert command_of(PEERS["cairn"], place)[1][-2:] == ["--quantization", quantization]
    assert quantization not in command_of(PEERS["llama-server"], place)[1]
    assert "--quantization" not in command_of(PEERS["cairn"], PLACE)[1]


def test_both_are_held_to_the_same_instructions():
    place = replace(PLACE, isa="avx2")
    assert command_of(PEERS["cairn"], place)[0]["CAIRN_MAX_CPU_ISA"] == "avx2"
    assert command_of(PEERS["cairn"], PLACE)[0]["CAIRN_MAX_CPU_ISA"] == ""
    assert command_of(PEERS["llama-server"], place)[1][0].endswith("/peers/llama/avx2/llama-server")
    assert command_of(PEERS["llama-server"], PLACE)[1][0].endswith("/peers/llama/native/llama-server")
    held = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(HELD)}
    assert command_of(PEERS["vllm"], place)[0].items() >= held.items()
    assert all(command_of(PEERS["vllm"], PLACE)[0][name] == "" for name in held)


def test_a_held_vllm_sees_no_more_than_avx2():
    asks = "import torch; print(torch.cpu._is_avx512_supported(), torch.cpu.get_capabilities().get('sse2'))"
    environ = environment_of({"PYTHONPATH": str(HELD)}, os.environ)
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=120, env=environ)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_what_a_server_cannot_do_is_refused():
    for name in ("vllm", "vllm-auto"):
        with pytest.raises(PeerError, match="--quantization int8"):
            command_of(PEERS[name], replace(PLACE, quantization="int8"))
        with pytest.raises(PeerError, match="held to avx2 alone: no --isa avx512"):
            command_of(PEERS[name], replace(PLACE, isa="avx512"))
    held_to_nothing = Peer("other", "serve {model}")
    with pytest.raises(PeerError, match="--isa"):
        command_of(held_to_nothing, replace(PLACE, isa="avx2"))


def test_llama_server_has_the_same_limits():
    _, cairn = command_of(PEERS["cairn"], PLACE)
    _, llama = command_of(PEERS["llama-server"], PLACE)
    for own, other in (
        ("--threads", "--cpu-threads"),
        ("--threads-batch", "--cpu-threads"),
        ("--parallel", "--max-num-seqs"),
        ("--ctx-size", "--max-model-len"),
        ("--batch-size", "--max-num-batched-tokens"),
        ("--alias", "--served-model-name"),
    ):
        assert llama[llama.index(own) + 1] == cairn[cairn.index(other) + 1]
    assert llama[llama.index("--cache-ram") + 1] == str(3 * 1024)


# -- the build -------------------------------------------------------------------------------------------------------


def test_llama_cpp_alone_is_unpacked(tmp_path):
    names = ["vendor/llama.cpp/CMakeLists.txt", "vendor/llama.cpp/src/a.cpp", "llama_cpp/b.py", "vendor/other/c"]
    archive, target = tmp_path / "package.tar.gz", tmp_path / "source"
    with tarfile.open(archive, "w:gz") as packed:
        for name in names:
            packed.addfile(tarfile.TarInfo(f"package-1/{name}"), io.BytesIO())
        link = tarfile.TarInfo("package-1/vendor/llama.cpp/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        packed.addfile(link)
    unpack_source(archive, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {"CMakeLists.txt", "src/a.cpp"} and not (target / "link").exists()


@pytest.mark.parametrize("name", ["package-1/other/CMakeLists.txt", "package-1/vendor/llama.cpp/../../../evil"])
def test_a_package_that_is_not_as_it_was_is_refused(tmp_path, name):
    archive = tmp_path / "package.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(PeerError, match=r"package\.tar\.gz is not as it was"):
        unpack_source(archive, tmp_path / "a" / "b" / "source")
    assert not (tmp_path / "evil").exists()


def test_all_of_the_matrix_units_configuration_is_stored(tmp_path):
    file = tmp_path / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    file.parent.mkdir(parents=True)
    file.write_text("tc.palette_id = 1;\n_tile_loadconfig(&tc);\n")
    peer_llama.mend_tiles(tmp_path)
    assert file.read_text().index('"memory"') < file.read_text().index("_tile_loadconfig(&tc);")
    file.write_text("nothing of it\n")
    with pytest.raises(PeerError, match="not as it was"):
        peer_llama.mend_tiles(tmp_path)


def test_programs_are_compiled_once_for_each_set_of_instructions(tmp_path):
    said, programs = tmp_path / "said", " ".join(PROGRAMS)
    script(
        tmp_path / "bin" / "cmake",
        f'echo "$@" >> {said}; mkdir -p {tmp_path}/build/bin; for name in {programs}; do '
        f'f={tmp_path}/build/bin/$name; echo "#!/bin/sh" > $f; chmod 700 $f; done',
    )
    mark_finished(tmp_path, peer_llama.VERSION)
    for isa in (NATIVE, "avx2", NATIVE, "avx2"):
        peer_llama.set_up(tmp_path, isa, 3, "no python is asked")
        assert all((programs_of(tmp_path, isa) / name).is_file() for name in PROGRAMS)
    configured, built, configured_avx2, built_again = said.read_text().splitlines()
    assert "-DGGML_NATIVE=ON" in configured and "AVX512" not in configured
    assert built == built_again and "--parallel 3" in built and programs in built
    for switch in ("NATIVE=OFF", "AVX2=ON", "FMA=ON", "AVX512=OFF", "AVX512_VNNI=OFF", "AMX_INT8=OFF", "AVX_VNNI=OFF"):
        assert f"-DGGML_{switch}" in configured_avx2
    assert [name for name in ISAS["avx512"] if ISAS["avx512"][name] != ISAS["avx2"][name]] == ["AVX512"]


def test_a_build_that_fails_says_why_and_is_not_taken_for_one(tmp_path):
    script(tmp_path / "bin" / "cmake", 'case "$1" in -S) ;; *) echo no such header >&2; exit 1;; esac')
    mark_finished(tmp_path, peer_llama.VERSION)
    with pytest.raises(PeerError, match=r"cannot be compiled\.\nno such header"):
        peer_llama.set_up(tmp_path, NATIVE, 1, "python")
    assert not programs_of(tmp_path, NATIVE).exists()


# -- GGUF files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    (folder / "source" / "conversion").mkdir(parents=True)
    (folder / "source" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (folder / "source" / "conversion" / "__init__.py").touch()
    (folder / "source" / "conversion" / "base.py").write_text(BASE)
    script(programs_of(folder, NATIVE) / "llama-quantize", 'echo "$1 $2 $3 $6" > "$5"')
    return folder


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    return folder


def test_a_checkpoint_is_converted_and_quantized_once(llama, model, tmp_path):
    plain = gguf_of(model, "", llama, NATIVE)
    assert plain == tmp_path / "model-bf16.gguf" and plain.read_text() == "qwen35 --outtype bf16 --no-mtp"
    for quantization, form in (("int8", "q8_0"), ("int4", "q4_0")):
        found = gguf_of(model, quantization, llama, NATIVE)
        assert found.name == f"model-{form}.gguf"
        assert found.read_text().split() == ["--pure", "--token-embedding-type", "bf16", form]
    assert sorted(path.suffix for path in tmp_path.glob("model-*")) == [".gguf"] * 3
    (llama / "source" / "convert_hf_to_gguf.py").unlink()
    assert gguf_of(model, "", llama, NATIVE) == plain


def test_a_head_that_predicts_tokens_is_kept(llama, model):
    (model / "config.json").write_text(json.dumps({"mtp_num_hidden_layers": 1}))
    assert "--no-mtp" not in gguf_of(model, "", llama, NATIVE).read_text()


def test_a_conversion_that_fails_says_why_and_leaves_no_file(llama, model, tmp_path):
    (llama / "source" / "convert_hf_to_gguf.py").write_text("def main(): raise SystemExit('no such architecture')")
    with pytest.raises(PeerError, match=r"cannot be written as GGUF\.\n(.*\n)*no such architecture"):
        gguf_of(model, "", llama, NATIVE)
    assert not [*tmp_path.glob("*.gguf")]


# -- agreement -------------------------------------------------------------------------------------------------------


def truth(vocabulary=50):
    return torch.randn(ANSWER_TOKENS, vocabulary, generator=torch.manual_seed(0)).mul(3).log_softmax(-1)


def positions_of(logprobs):
    rows = logprobs.tolist()
    listed = [[{"id": token, "logprob": value} for token, value in enumerate(row)] for row in rows]
    return [
        {"id": max(range(len(row)), key=row.__getitem__), "top_logprobs": top}
        for row, top in zip(rows, listed, strict=True)
    ]


def completion(logprobs, without=()):
    """What llama-server says: tokens that end within a character are `without` log-probabilities."""
    positions = positions_of(logprobs)
    kept = [one for place, one in enumerate(positions) if place not in without]
    return {"tokens": [one["id"] for one in positions], "completion_probabilities": kept}


def asked(logprobs, reference=None, status=200, without=()):
    bodies = []

    def answer(request):
        bodies.append(json.loads(request.content))
        return httpx.Response(status, json=completion(logprobs, without))

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        found = agreement_of(http, "http://server.test", (5, 6, 7), reference or (lambda prompt, tokens: truth()))
    return found, bodies[0]


def test_the_server_is_asked_for_a_greedy_answer_from_the_start():
    told = []

    def reference(prompt, tokens):
        told.append((prompt, tokens))
        return truth()

    found, body = asked(truth(), reference)
    assert found.correlation == pytest.approx(1, abs=1e-4) and found.same == 1
    assert body["prompt"] == [5, 6, 7] and body["temperature"] == 0 and body["n_predict"] == ANSWER_TOKENS
    assert body["cache_prompt"] is False and body["ignore_eos"] is True
    assert body["return_tokens"] is True
    assert told == [((5, 6, 7), truth().argmax(-1).tolist())]


def test_tokens_that_end_within_a_character_are_left_out_and_the_others_stay_where_they_are():
    found, _ = asked(truth(), without=(0, 7, 31))
    assert found.correlation == pytest.approx(1, abs=1e-4) and found.same == 1
    with pytest.raises(PeerError, match="of 32 tokens only 10 have"):
        asked(truth(), without=range(22))


def test_rounding_agrees_and_another_model_does_not():
    noise = torch.randn(truth().shape, generator=torch.manual_seed(1))
    near, _ = asked(truth() + 0.1 * noise)
    near.check("llama-server", "")
    # One wrong position of all is enough.
    wrong = truth()
    wrong[7] = truth()[8]
    for other, quantization in ((noise, "int4"), (truth().roll(1, 0), "int8"), (wrong, "int4")):
        with pytest.raises(PeerError, match="llama-server does not compute what transformers does"):
            asked(other)[0].check("llama-server", quantization)


@pytest.mark.parametrize("quantization", LEAST)
def test_no_agreement_is_none_where_numbers_are_missing(quantization):
    with pytest.raises(PeerError, match="correlation"):
        Agreement(float("nan"), 1.0).check("llama-server", quantization)


def test_an_answer_that_is_short_or_none_is_refused():
    with pytest.raises(PeerError, match="3 tokens, and 32"):
        asked(truth()[:3])
    with pytest.raises(PeerError, match="HTTP 500"):
        asked(truth(), status=500)


def test_transformers_is_asked_about_the_servers_own_answer(tiny_model):
    """Its log-probabilities are those that it has when it generates."""
    reference = peer_agreement.TransformersReference(tiny_model, "float32")
    answer = reference.generate((5, 6, 7), 4)
    found = reference.logprobs((5, 6, 7), answer.token_ids)
    assert torch.allclose(found, answer.logprobs, atol=1e-4) and found.argmax(-1).tolist() == answer.token_ids


def test_a_server_that_computes_something_else_is_not_measured(tiny_model, tmp_path, monkeypatch):
    class Reference:
        def __init__(self, folder, dtype):
            assert folder == tiny_model and dtype == "float32"

        def logprobs(self, prompt, answer):
            return truth()

    monkeypatch.setattr(peer_agreement, "TransformersReference", Reference)
    other = json.dumps(completion(truth().roll(1, 0)))
    server = tmp_path / "server.py"
    server.write_text(
        f"""
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write({other!r}.encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    )
    gguf = tmp_path / "model.gguf"
    arguments = parse(["--model", str(tiny_model), "--gguf", str(gguf), "--json", str(tmp_path / "peers.json")])
    peer = Peer("mine", f"{{python}} {server} {{port}} {{gguf}}")
    comparison = Comparison(arguments, [peer], QUICK, tmp_path)
    with pytest.raises(PeerError, match="mine does not compute what transformers does"):
        comparison.run("model", tiny_model, ["decode"])
    assert not comparison.turns and not arguments.json.exists()


def test_check_agreement_names_the_server_that_is_not_there(tiny_model):
    with pytest.raises(PeerError, match="mine has not answered"):
        check_agreement("http://127.0.0.1:9", "mine", tiny_model, "", (0,))


# -- what the machine can do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "instructions"),
    [
        ({"avx2", "fma"}, ["vfmadd231ps", "vpmaddwd"]),
        ({"avx2", "fma", "avx512f", "avx512bw"}, ["vfmadd231ps", "vpmaddwd"]),
        ({"avx2", "fma", "avx512f", "avx512bw", "avx512vnni"}, ["vfmadd231ps", "vpdpbusd"]),
        ({"avx512f", "avx512vnni", "avx512bf16", "amx-int8"}, ["vfmadd231ps", "vpdpbusd", "vdpbf16ps", "tdpbssd"]),
        (set(), []),
    ],
)
def test_bounds_are_by_the_best_instructions_there_are(features, instructions):
    loops = loops_of(features.__contains__)
    assert [loop.code.split()[0] for loop in loops] == instructions
    assert {loop.bytes_of_vector for loop in loops} <= {64 if "avx512f" in features else 32}


def test_bounds_are_measured(monkeypatch):
    monkeypatch.setattr(machine_bounds, "MEMORY_BYTES", 8 << 20)
    found = bounds(1, 0.01)
    assert found.pop("memory_gb_per_s") > 0.1
    loops = {loop.name: loop for loop in loops_of(lambda name: bool(machine_bounds.cpu_features().get(name)))}
    assert found.keys() <= loops.keys() and found.keys() >= {name for name in loops if not loops[name].tiles}
    # Of a processor of one gigahertz with one such unit a tenth, and of one of ten with four all.
    for name, rate in found.items():
        assert 0.1 * loops[name].operations / (64 if loops[name].tiles else 1) < rate < 40 * loops[name].operations


def test_bounds_are_shown(tmp_path):
    console = Console(width=80, record=True, file=(tmp_path / "table").open("w"))
    console.print(bounds_table_of([{"memory_gb_per_s": value} for value in (30.0, 10.0, 20.0)], 2))
    console.file.close()
    text = (tmp_path / "table").read_text()
    assert all(one in text for one in ("2 threads", "memory_gb_per_s", "20.0", "10.0", "30.0"))
