"""Which cases of a large table run on each commit.

`@pytest.mark.parts(3)` runs a fixed third of a test's cases on each commit and the others nightly. A case belongs to a
part by a hash of its name, so the part stays the same when cases are added. With a name, `parts(2, "training")`, all
cases that have it go together.
"""

from zlib import crc32


def on_each_commit(name: str, parts: int) -> bool:
    """Whether a case of this name runs on each commit."""
    return crc32(name.encode()) % parts == 0
