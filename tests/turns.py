"""Which part of many tests alike a commit runs: `@pytest.mark.turns(3)` leaves two thirds of a test's cases to other commits, and all of them to the
night. `make test` has them take turns (`pytest --turns`); pytest by itself runs all. With a name, `turns(2, "training")`, what has it goes together.

A commit is known by its hash, so that each run of it runs the same, and a clone without history another part at the next one.
"""

import subprocess
from functools import lru_cache
from pathlib import Path
from zlib import crc32


@lru_cache
def commit() -> int:
    """The commit's hash; 0 where there is none, as in an archive, or no git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return 0
    return int(found.stdout, 16) if found.returncode == 0 else 0


def has_turn(name: str, parts: int) -> bool:
    """Whether what has this name is of the part that this commit runs."""
    return crc32(name.encode()) % parts == commit() % parts
