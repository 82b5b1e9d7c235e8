"""Triton's keys of compiled kernels: a process finds on disk what another compiled, whatever it ran before."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

KEYS = """
import json, sys, threading, time
from triton.runtime import jit
from strobe.kernels.blackwell import forward as blackwell
from strobe.kernels.device.tile_scheduler import word
from strobe.kernels.hopper import backward, backward_preprocess, decode, forward
from strobe.kernels.runtime.compile_cache import hash_callees_first
from strobe.kernels.portable import backward as portable_backward, decode as portable_decode, forward as portable

named = [
    (module.__name__, name, kernel)
    for module in (
        portable, portable_backward, portable_decode, decode, forward, backward, backward_preprocess, blackwell,
    )
    for name, kernel in vars(module).items()
    if name.endswith("_kernel") and name != "_kernel"
]
if sys.argv[1] == "backwards":
    named.reverse()
if sys.argv[2] == "beside another":  # thread that is about to hash a callee of both kernels
    parse, begun = jit.JITFunction.parse, threading.Event()

    def slow(function):
        if function is word and not begun.is_set():
            begun.set()
            time.sleep(0.5)
        return parse(function)

    jit.JITFunction.parse = slow
    other = threading.Thread(target=hash_callees_first, args=(forward.forward_kernel,))
    other.start()
    begun.wait()
    hash_callees_first(backward.backward_kernel)
    other.join()
keys, constants = {}, {}
for module, name, kernel in named:
    if sys.argv[2] != "as Triton does":
        hash_callees_first(kernel)
    keys[f"{module}.{name}"] = kernel.cache_key
    used = kernel.used_global_vals.items()
    constants[f"{module}.{name}"] = [(constant, str(value)) for (constant, _), (value, _) in used]
print(json.dumps((keys, constants), sort_keys=True))
"""


def _keys(order: str, way: str) -> tuple[dict, dict]:
    run = subprocess.run([sys.executable, "-c", KEYS, order, way], capture_output=True, text=True, check=True)
    return tuple(json.loads(run.stdout))


def test_a_key_does_not_depend_on_what_was_compiled_before():
    keys, constants = _keys("forwards", "callees first")
    assert keys == _keys("backwards", "callees first")[0] and len(keys) > 8
    for kernel, held in constants.items():  # Triton sorts those of one name by where their module lies
        assert len(dict(held)) == len({tuple(one) for one in held}), (
            f"{kernel} calls functions of modules that give one name two values: {held}"
        )


@pytest.mark.nightly
def test_a_key_does_not_depend_on_other_threads_though_tritons_own_does_on_order():
    keys, _ = _keys("forwards", "callees first")
    assert keys == _keys("forwards", "beside another")[0]
    assert keys != _keys("backwards", "as Triton does")[0], "Triton's keys have no order now: compile_cache.py can go"
