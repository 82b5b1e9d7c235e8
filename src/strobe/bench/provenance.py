"""Which source a measurement ran: the hash of git's tree of src/strobe, and the commit.

A machine with a GPU often has the files without their history. The hash needs the files alone, and
`git rev-parse COMMIT:src/strobe` prints the same for the commit that they are from.
"""

from __future__ import annotations

import subprocess
from functools import lru_cache
from hashlib import sha1
from pathlib import Path

from ..env import ENV

PACKAGE = Path(__file__).resolve().parents[1]


@lru_cache
def commit() -> str | None:
    """The commit of the source tree, else STROBE_COMMIT. None for an installed package, also in another repository."""
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--show-toplevel", "--short", "HEAD"],
            cwd=PACKAGE,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        top, found = asked.stdout.split("\n")[:2]
    except (OSError, subprocess.SubprocessError):
        return ENV.commit or None
    return found if Path(top).resolve() / "src" / "strobe" == PACKAGE else ENV.commit or None


@lru_cache
def source_tree() -> str:
    """The first 12 digits of git's hash of this package's files.

    >>> len(source_tree())
    12
    """
    return tree_hash(PACKAGE).hex()[:12]


def tree_hash(folder: Path) -> bytes:
    """git's hash of a folder, without files that Python compiled."""
    return _hash("tree", _entries(folder))


def _entries(folder: Path) -> bytes:
    """A folder as git's tree object. Empty for a folder without files, which git does not know."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            if inside := _entries(path):  # git sorts a folder as "name/"
                entries.append((f"{path.name}/", f"40000 {path.name}", _hash("tree", inside)))
        else:
            mode = "100755" if path.stat().st_mode & 0o100 else "100644"
            entries.append((path.name, f"{mode} {path.name}", _hash("blob", path.read_bytes())))
    return b"".join(head.encode() + b"\0" + digest for _, head, digest in sorted(entries))


def _hash(kind: str, content: bytes) -> bytes:
    return sha1(f"{kind} {len(content)}\0".encode() + content).digest()
