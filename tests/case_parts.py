"""Which cases of a large table run on each commit.

`@pytest.mark.parts(3)` runs a fixed third of a test's cases on each commit and the others nightly. A case belongs to a
part by a checksum of its name, so it keeps its part when other cases are added and when the test moves to another file.
`seed` starts the checksum: another seed gives another division. With a name, `parts(2, "training")`, all cases that
have it go together.
"""

from zlib import crc32


def on_each_commit(name: str, parts: int, seed: int = 0) -> bool:
    """Whether a case of this name runs on each commit."""
    return crc32(name.encode(), seed) % parts == 0
