"""The version has one place, and a release is refused for a fault."""

import re
from pathlib import Path

import pytest

import strobe
from tools import matrix, release_check

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_version_is_the_packages_citations_and_changelogs():
    assert strobe.__version__ == release_check.version()
    citation = (ROOT / "CITATION.cff").read_text()
    released = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.MULTILINE)
    sections = re.findall(r"^## (\S+) - (\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released and (strobe.__version__, released[2]) == sections[0] and released[1] == strobe.__version__
    assert sections == sorted(sections, reverse=True)


def test_the_simulators_distribution_has_the_same_version_and_needs_no_torch():
    import strobe.sim

    project = (release_check.SIM / "pyproject.toml").read_text()
    assert strobe.sim.__version__ == strobe.__version__
    assert (release_check.SIM / "src" / "strobe_sim").resolve() == (ROOT / "src" / "strobe" / "sim").resolve()
    assert (release_check.SIM / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    needed = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)[1]
    assert re.findall(r'"(\w+)', needed) == ["greenlet", "numpy", "triton"]
    assert "strobe-sim = " in re.search(r"pytest11\]\n(.*)", project)[1]  # both plugins have this name: one is loaded
    assert re.search(r"pytest11\]\n(.*) = ", PROJECT)[1] == "strobe-sim"


def test_the_librarys_build_does_not_enter_the_link_to_the_simulator():
    """hatchling takes a folder once: through the link, src/strobe/sim would be missing from the distribution."""
    build = PROJECT.partition("[tool.hatch.build]")[2]
    assert "skip-excluded-dirs = true" in build
    assert 'exclude = ["/packages/strobe-sim"]' in build.partition("targets.sdist]")[2].partition("[tool.ruff]")[0]


def test_every_page_names_the_repository_of_pyproject():
    owner, name = re.search(r'^Repository = "https://github.com/([\w-]+)/([\w-]+)"$', PROJECT, re.MULTILINE).groups()
    pages = [path for pattern in ("*.md", "*.cff", "*.yml", ".github/**/*.*") for path in ROOT.glob(pattern)]
    assert len(pages) >= 8
    for page in pages:
        found = re.findall(r"github\w*\.com/([\w-]*strobe[\w-]*)/([\w-]+)", page.read_text())
        assert set(found) <= {(owner, name)}, page


@pytest.mark.parametrize("tag", ["v0.0.9", strobe.__version__])
def test_a_tag_of_another_version_is_refused(tag, capsys, monkeypatch):
    monkeypatch.setattr(release_check, "build", lambda *_: pytest.fail("it must not build"))
    assert release_check.main(["--tag", tag]) == 1
    assert f"the tag is {tag}" in capsys.readouterr().err


def test_a_pair_without_its_python_is_skipped(tmp_path):
    outcome = matrix.attempt("2.0", "torch", tmp_path / "none.whl", "file:///nowhere")
    assert outcome.state == "skipped"


def test_the_matrix_covers_the_pythons_of_the_classifiers():
    assert tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)) == matrix.PYTHONS
    assert f'requires-python = ">={matrix.PYTHONS[0]}"' in PROJECT


def test_the_smoke_test_passes_here(capsys):
    from tools import smoke

    smoke.main()
    assert f"strobe {strobe.__version__}" in capsys.readouterr().out


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(workflow):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"- run: (.*)$", workflow.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert command.split()[0] == "make" and command.split()[1] in targets, command
