"""Build the wheels and source distributions of the library and of its simulator, check them, and run each wheel in an
empty environment.

    python -m tools.release_check                          dist/ and .release/; `make dist` brings its tools
    python -m tools.release_check --torch torch==2.13.0    the torch that the empty environment gets

The environment gets torch by the requirement above, so that `PIP_EXTRA_INDEX_URL` can offer builds for CPUs. Exit code:
0, or 1 with the first failure in words.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIM = ROOT / "packages" / "strobe-sim"
DIST, FOLDER = ROOT / "dist", ROOT / ".release"
TORCH = "torch==2.13.0"
MOST_WHEEL_BYTES, MOST_SDIST_BYTES = 1_000_000, 2_000_000
NOT_IN_SDIST = ("results/", ".github/", ".ci/", "site/", "docs/")


class ReleaseFault(Exception):
    """A distribution that must not be published."""


def version() -> str:
    """The version in src/strobe/__init__.py, without an import of torch."""
    found = re.search(r'^__version__ = "(.+?)"', (ROOT / "src/strobe/__init__.py").read_text(), re.MULTILINE)
    if not found:
        raise ReleaseFault('src/strobe/__init__.py has no line __version__ = "..."')
    return found[1]


def wheel_faults(
    names: Sequence[str], size: int, sources: Sequence[str], distribution: str = "strobe_attention"
) -> list[str]:
    """Faults of a wheel with these members and this size in bytes, for sources such as "strobe/env.py".

    >>> wheel_faults(["strobe/a.py", "strobe_attention-0.2.0.dist-info/METADATA"], 10, ["strobe/a.py"])
    []
    >>> wheel_faults(["strobe/a.py", "tests/b.py"], 2_000_000, ["strobe/a.py", "strobe/c.py"])
    ['2,000,000 bytes, more than 1,000,000', 'tests/b.py is not part of the package', 'strobe/c.py is missing']
    """
    inside = re.compile(distribution + r"-[^/]+\.dist-info/")
    faults = [f"{size:,} bytes, more than {MOST_WHEEL_BYTES:,}"] if size > MOST_WHEEL_BYTES else []
    faults += [f"{name} is not part of the package" for name in names if name not in sources and not inside.match(name)]
    return faults + [f"{name} is missing" for name in sources if name not in names]


def sdist_faults(names: Sequence[str], size: int, package: str = "strobe") -> list[str]:
    """Faults of a source distribution with these members, relative to its folder.

    >>> sdist_faults(["pyproject.toml", "README.md", "LICENSE", "src/strobe/__init__.py", "results/forward.jsonl"], 10)
    ['results/forward.jsonl does not belong into it']
    """
    needed = ("pyproject.toml", "README.md", "LICENSE", f"src/{package}/__init__.py")
    faults = [f"{size:,} bytes, more than {MOST_SDIST_BYTES:,}"] if size > MOST_SDIST_BYTES else []
    faults += [f"{name} does not belong into it" for name in names if name.startswith(NOT_IN_SDIST)]
    return faults + [f"{name} is missing" for name in needed if name not in names]


def build(project: Path, distribution: str) -> tuple[Path, Path]:
    """Build a project's sdist, and the wheel from it, into dist/. Returns (wheel, sdist)."""
    for old in DIST.glob(f"{distribution}-*"):
        old.unlink()
    _run(sys.executable, "-m", "build", "--outdir", DIST, project)
    wheel, sdist = (next(iter(DIST.glob(distribution + end)), None) for end in ("-*.whl", "-*.tar.gz"))
    if wheel is None or sdist is None:
        raise ReleaseFault(f"{DIST} has no wheel or no sdist of {distribution}")
    return wheel, sdist


def check(wheel: Path, sdist: Path, package: Path) -> None:
    """Raises ReleaseFault for a name, a size, a member or a description that an index or a user would stumble on."""
    _run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    _run(sys.executable, "-m", "check_wheel_contents", wheel)
    distribution = wheel.name.partition("-")[0]
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    sources = sorted(path.relative_to(package.parent).as_posix() for path in files)
    with zipfile.ZipFile(wheel) as archive:
        faults = wheel_faults(archive.namelist(), wheel.stat().st_size, sources, distribution)
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    faults += sdist_faults(members, sdist.stat().st_size, package.name)
    faults += [f"{path.name} is not of version {version()}" for path in (wheel, sdist) if version() not in path.name]
    if faults:
        raise ReleaseFault("\n".join(faults))


def environment(folder: Path, python: str, *requirements: str | Path) -> Path:
    """The Python of a new environment in `folder` that holds the requirements and nothing else."""
    _run(python, "-m", "venv", "--clear", folder)
    found = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    _run(found, "-m", "pip", "install", "--quiet", "--no-compile", *requirements)
    return found


def run_installed(python: Path) -> None:
    """Import the installed package and run `tools/smoke.py` with it; -I hides this checkout and PYTHONPATH."""
    printed = _run(python, "-I", "-m", "strobe", "--version")
    if printed.strip() != f"strobe {version()}":
        raise ReleaseFault(f"strobe --version says {printed.strip()!r}, not {version()}")
    print(_run(python, "-I", ROOT / "tools" / "smoke.py").strip())


def run_simulator(python: Path) -> None:
    """Run `packages/strobe-sim/smoke.py` with the installed simulator, and ask its console script and pytest plugin."""
    print(_run(python, "-I", SIM / "smoke.py").strip())
    _run(python.with_name("strobe-sim"), "--help")
    if "--simulate" not in _run(python, "-I", "-m", "pytest", "--help"):
        raise ReleaseFault("pytest does not load the plugin of strobe-sim")


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise ReleaseFault(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release_check", description="Build and check a release.")
    parser.add_argument("--torch", default=TORCH, metavar="REQUIREMENT", help=f"default {TORCH}")
    parser.add_argument("--tag", metavar="vVERSION", help="fail unless this is the version")
    parser.add_argument("--sim", action="store_true", help="strobe-sim alone")
    a = parser.parse_args(argv)
    try:
        if a.tag not in (None, f"v{version()}"):
            raise ReleaseFault(f"the tag is {a.tag}, and the version {version()}")
        shutil.rmtree(DIST, ignore_errors=True)
        built = build(SIM, "strobe_sim")
        check(*built, SIM / "src" / "strobe_sim")
        run_simulator(environment(FOLDER / "empty_sim", sys.executable, built[0], "pytest>=8"))
        if not a.sim:
            wheel, sdist = build(ROOT, "strobe_attention")
            built += wheel, sdist
            check(wheel, sdist, ROOT / "src" / "strobe")
            run_installed(environment(FOLDER / "empty", sys.executable, a.torch, wheel))
    except ReleaseFault as fault:
        print(fault, file=sys.stderr)
        return 1
    for path in built:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
