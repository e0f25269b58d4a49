"""A child for `GrammarChecker` that takes every grammar, but `hang` and `die` only if there is a file `better`.

It writes an x into the file `asked` for each of these.
"""

import os
import sys
from pathlib import Path

import msgspec

from cairn.engine.child_process import run_child
from cairn.engine.contract import Structure


def serve(parent) -> int:
    folder = Path(os.environ["GRAMMAR_CHILD_FOLDER"])
    while True:
        frame = parent.receive(None)
        if frame is None:
            continue
        text = msgspec.msgpack.decode(frame, type=Structure).text
        if text in ("hang", "die"):
            with (folder / "asked").open("a") as asked:
                asked.write("x")
            if not (folder / "better").exists():
                if text == "die":
                    return 1
                while True:
                    pass
        parent.send(msgspec.msgpack.encode(None))


if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1:], "grammars", serve))
