"""strobe-sim: the same sources under another name, its README's example, its command and its pytest plugin."""

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "packages" / "strobe-sim"
KERNEL = """
import triton, triton.language as tl
@triton.jit
def sum_kernel(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out, tl.load(out) + tl.sum(tl.load(x + at), 0))
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """A Python that finds strobe_sim in the project's sources, and pytest's plugins only if named."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROJECT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_readmes_example_finds_its_race(tmp_path):
    readme = (PROJECT / "README.md").read_text()
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1])
    done = python("example.py", folder=tmp_path)
    assert done.returncode == 1 and "strobe_sim.report.SimulationFault" in done.stderr
    assert "race: on out: store by main of CTA" in done.stderr


def test_the_command_names_itself(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNEL)
    call = "import sys; from strobe_sim.command import main; sys.exit(main())"
    help_text = python("-c", call, "--help", folder=tmp_path)
    assert help_text.stdout.startswith("usage: strobe-sim ") and "strobe sim" not in help_text.stdout
    arguments = ["kernels.py::sum_kernel", "ones:f32[128]", "zeros:f32[1]", "64", "--grid", "2", "--mode", "eager"]
    found = python("-c", call, *arguments, folder=tmp_path)
    assert found.returncode == 1 and "race: on out" in found.stdout
    wrong = python("-c", call, "nothing.py::kernel", folder=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("strobe-sim: scene: got 'nothing.py::kernel'")


def test_the_plugin_fails_a_test_with_the_faults(tmp_path):
    text = KERNEL + "\nimport numpy as np\ndef test_sum(simulate):\n    with simulate('sm_90'):\n"
    text += "        sum_kernel[(2,)](np.ones(128, np.float32), np.zeros(1, np.float32), 64)\n"
    (tmp_path / "test_kernels.py").write_text(text)
    done = python("-m", "pytest", "-q", "-p", "strobe_sim.plugin", folder=tmp_path)
    assert done.returncode == 1 and "race: on out" in done.stdout and "1 failed" in done.stdout
