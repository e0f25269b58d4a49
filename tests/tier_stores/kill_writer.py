"""A process that writes made-up paths into a folder until it is killed: see `test_disk.py`.

python kill_writer.py FOLDER SEED: it says so when it has opened the folder.
"""

import sys

from tier_entries import disk_store, later, path_entries

folder, seed = sys.argv[1], int(sys.argv[2])
store = disk_store(folder, 300_000)
print("open", flush=True)
number = seed * 1000
while True:
    store.write(path_entries(number, 1 + number % 5), later())
    print(number, flush=True)
    number += 1
