"""Runs vLLM's own server tests against cairn and writes what came of each: see README.md beside this file."""

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
NOT_CAIRNS = "does not apply"


def lines_of(name):
    """A data file's lines, comments left out."""
    return [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]


def run_file(args, name, record):
    """Runs one file of tests with a server of its own; returns the record's rows."""
    record.unlink(missing_ok=True)
    env = os.environ | {
        "PYTHONPATH": str(HERE),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "CAIRN": str(args.cairn),
        "CAIRN_MODEL": str(args.model),
        "CAIRN_VISION_MODEL": str(args.vision_model),
        "BED_RESULTS": str(record),
        "BED_LOGS": str(args.out),
    }
    top = args.sources / "tests" / Path(name).parts[0]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "bed", "-c", os.devnull, "--rootdir", str(args.sources),
        "--confcutdir", str(top), "-p", "no:cacheprovider", "--timeout", str(args.timeout),
        "-o", "timeout_func_only=true",
        "-W", "ignore", f"tests/{name}",
    ]  # fmt: skip
    if args.tests:
        command += ["-k", args.tests]
    with open(args.out / f"{Path(name).stem}.out", "w") as out:
        process = subprocess.Popen(command, cwd=args.sources, env=env, stdout=out, stderr=out)
        try:
            code = process.wait(args.file_timeout)
        except subprocess.TimeoutExpired:
            code = "it was cut off"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # pytest then ends its servers, too
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    if code not in (0, 1, 5):
        text = (args.out / f"{Path(name).stem}.out").read_text()
        rows.append({"test": f"tests/{name}", "outcome": "error", "asks_server": True, "asked": [],
                     "why": f"pytest: {code}: {text[-1200:]}"})  # fmt: skip
    return rows


def judge(row, judgements):
    """A verdict and its reason: what the run shows by itself, else what judgements.tsv says of the test."""
    test = row["test"].removeprefix("tests/")
    if not row["asks_server"]:
        return NOT_CAIRNS, "asks vLLM's own objects, no server"
    if row["outcome"] == "passed":
        return "pass", ""
    if row["outcome"] == "skipped":
        return NOT_CAIRNS, row["why"].removeprefix("Skipped: ")[:160]
    for pattern, verdict, reason in judgements:
        if fnmatch.fnmatchcase(test.replace("[", "("), pattern.replace("[", "(")):
            return verdict, reason
    if row["asked"]:
        return NOT_CAIRNS, "asks vLLM's own objects: " + ", ".join(row["asked"])[:120]
    return "deviates", " ".join(row["why"].split())[:240]


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, help="folder of vLLM's unpacked source package")
    parser.add_argument("--cairn", type=Path, default=CHECKOUT / ".venv/bin/cairn")
    parser.add_argument("--model", type=Path, default=CHECKOUT / "build/scripted-model")
    parser.add_argument("--vision-model", type=Path, default=CHECKOUT / "build/scripted-vision-model")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build/vllm-tests")
    parser.add_argument(
        "--files", nargs="*", default=["*"], help="patterns of the files in files.txt; all unless given"
    )
    parser.add_argument("--tests", help="as pytest's -k")
    parser.add_argument("--timeout", type=int, default=120, help="seconds a test may take")
    parser.add_argument("--file-timeout", type=int, default=1800, help="seconds a file's tests may take")
    args = parser.parse_args()
    args.sources, args.out = args.sources.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    judgements = [line.split("\t") for line in lines_of("judgements.tsv")]
    table = {}
    results = args.out / "results.tsv"
    if results.exists():
        for line in results.read_text().splitlines():
            if line.startswith("#"):
                continue
            test, verdict, reason = line.split("\t")
            table[test] = (verdict, reason)
    names = [name for name in lines_of("files.txt") if any(fnmatch.fnmatch(name, p) for p in args.files)]
    for name in names:
        rows = run_file(args, name, args.out / "record.jsonl")
        found = {row["test"].removeprefix("tests/"): judge(row, judgements) for row in rows}
        if not args.tests:
            table = {test: judged for test, judged in table.items() if not test.startswith(name)}
        table |= found
        with open(args.out / name.replace("/", "_").replace(".py", ".jsonl"), "w") as kept:
            kept.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{name}: {dict(Counter(verdict for verdict, _ in found.values()))}", flush=True)
        for test, (verdict, reason) in found.items():
            if verdict == "deviates":
                print(f"    {test.partition('::')[2]}: {reason}", flush=True)
        text = "".join(f"{test}\t{verdict}\t{reason}\n" for test, (verdict, reason) in sorted(table.items()))
        results.write_text("# test, verdict, reason; made by run.py\n" + text.replace("\r", ""))
    print(dict(Counter(verdict for verdict, _ in table.values())))
    sys.exit(any(verdict == "deviates" for verdict, _ in table.values()))


if __name__ == "__main__":
    main()
