"""`make browser`: what there is stays, root with apt-get installs, and without either the tests are skipped with a
word, never failed.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "id", "cat")
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def browser(folder: Path, **programs: str) -> list[str]:
    """What `make browser` says where these programs are all there is, each a script; "asked" collects what apt-get was
    given.
    """
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, script in programs.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [str(shutil.which("make")), "--no-print-directory", "-f", ROOT / "Makefile", "browser"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(folder)},
    )
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout.splitlines()


ASKED = 'echo "$@" >> asked'
SKIPPED = ["no Chromium here, and apt-get did not bring it: tests in a browser are skipped"]


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_one_that_is_there_stays(tmp_path, name):
    assert browser(tmp_path, **{name: "exit 1", "id": "echo 0", "apt-get": ASKED}) == []
    assert not (tmp_path / "asked").exists()


def test_root_installs_it_after_an_update(tmp_path):
    assert browser(tmp_path, id="echo 0", **{"apt-get": ASKED}) == ["installed chromium"]
    update, install = (tmp_path / "asked").read_text().splitlines()
    assert update.endswith(" update") and install.endswith(" install -y --no-install-recommends chromium")


@pytest.mark.parametrize("last", ["update", "install -y --no-install-recommends chromium"])
def test_without_a_network_or_a_package_the_tests_are_skipped(tmp_path, last):
    failing = f'{ASKED}; case "$*" in *"{last}") exit 100;; esac'
    assert browser(tmp_path, id="echo 0", **{"apt-get": failing}) == SKIPPED
    assert (tmp_path / "asked").read_text().splitlines()[-1].endswith(last)


def test_who_is_not_root_or_has_no_apt_get_is_told(tmp_path):
    assert browser(tmp_path, id="echo 1000", **{"apt-get": ASKED}) == SKIPPED and not (tmp_path / "asked").exists()


def test_without_apt_get_nothing_is_tried(tmp_path):
    assert browser(tmp_path, id="echo 0") == SKIPPED
