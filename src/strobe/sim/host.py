"""What host code sees of the GPU: Triton's driver, torch.cuda's answers, autotuned kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from .arrays import torch_if_installed
from .options import MOST_WARPS, REGISTERS, SHARED_KIB


def capability_of(target: str) -> int:
    """90 for "sm_90" or "sm_90a". Raises ValueError for a target that the simulator does not know."""
    number = target.removeprefix("sm_").rstrip("a")
    if not number.isdigit() or int(number) not in SHARED_KIB:
        known = ", ".join(f"sm_{known}" for known in SHARED_KIB)
        raise ValueError(f"target: got {target!r}, expected one of {known}")
    return int(number)


class Driver:
    """The part of Triton's active driver that launches and host code use."""

    def __init__(self, capability: int, sms: int, device: str = "cpu"):
        self._target, self.device = GPUTarget("cuda", capability, 32), device
        shared = SHARED_KIB[capability] * 1024
        properties = dict(
            max_shared_mem=shared, max_num_regs=REGISTERS, multiprocessor_count=sms, warpSize=32,
            sm_clock_rate=1_755_000, mem_clock_rate=2_619_000, mem_bus_width=5120,
        )  # fmt: skip
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(properties))

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(int(self._target.arch), 10)

    def get_active_torch_device(self) -> Any:
        return torch_if_installed().device(self.device)

    def get_device_interface(self) -> Any:
        return torch_if_installed().cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return timed_once

    def get_empty_cache_for_benchmark(self) -> Any:
        return torch_if_installed().empty(1)

    def clear_cache(self, cache: Any) -> None: ...


class _Event:
    """Times are not simulated: all events are at time zero."""

    def __init__(self, *_: object, **__: object): ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def timed_once(call: Callable[[], object], *_: object, quantiles: Any = None, **__: object) -> Any:
    """Run what would be timed, once. Its time is 1 ms."""
    call()
    return 1.0 if quantiles is None else [1.0] * len(quantiles)


@contextlib.contextmanager
def answers(capability: int, sms: int, every_config: bool = False, device: str = "") -> Iterator[None]:
    """Triton's driver and torch.cuda answer for a GPU of this capability, with this number of multiprocessors.

    An autotuned kernel runs with its first configuration, or with each of them.
    """
    properties = SimpleNamespace(
        name="simulated", major=capability // 10, minor=capability % 10, multi_processor_count=sms,
        total_memory=80 * 2**30, warp_size=32, max_threads_per_multi_processor=32 * MOST_WARPS[capability],
        regs_per_multiprocessor=REGISTERS, shared_memory_per_multiprocessor=(SHARED_KIB[capability] + 1) * 1024,
        shared_memory_per_block_optin=SHARED_KIB[capability] * 1024, L2_cache_size=50 * 2**20,
    )  # fmt: skip
    outer = driver._active
    device = device or (outer.device if isinstance(outer, Driver) else "cpu")  # within cuda_on_cpu it stays "cuda:0"
    stream = SimpleNamespace(cuda_stream=0, device_index=0, synchronize=lambda: None)
    replaced: dict[str, Any] = dict(
        get_device_capability=lambda *_: divmod(capability, 10), get_device_properties=lambda *_: properties,
        get_device_name=lambda *_: "simulated", current_device=lambda: 0, device_count=lambda: 1,
        synchronize=lambda *_: None, current_stream=lambda *_: stream, Event=_Event, set_device=lambda *_: None,
        device=lambda *_: contextlib.nullcontext(), empty_cache=lambda: None,
    )  # fmt: skip
    with contextlib.ExitStack() as patches:
        if (torch := torch_if_installed()) is not None:
            for name, value in replaced.items():
                patches.enter_context(mock.patch.object(torch.cuda, name, value))
        patches.enter_context(mock.patch.object(driver, "_active", Driver(capability, sms, device)))
        patches.enter_context(mock.patch.object(Autotuner, "run", _autotuned(every_config)))
        yield


def _autotuned(every_config: bool) -> Callable[..., object]:
    """Replaces Autotuner.run, which would time the configurations."""

    def run(self: Any, *arguments: object, **keywords: object) -> object:
        self.nargs = dict(zip(self.arg_names, arguments))
        pruned = self.prune_configs(keywords) if len(self.configs) > 1 else self.configs
        configs = [config for config in pruned if config.num_ctas == 1] or pruned
        *others, chosen = configs if every_config else configs[:1]
        for config in others:
            named = {**self.nargs, **keywords, **config.all_kwargs()}
            if config.pre_hook:
                config.pre_hook(named)
            self.pre_hook(named)
            self.fn.run(*arguments, **keywords, **config.all_kwargs())
            self.post_hook(named, exception=None)
        self.best_config = chosen
        named = {**self.nargs, **keywords, **chosen.all_kwargs()}
        self.pre_hook(named, reset_only=True)
        if chosen.pre_hook:
            chosen.pre_hook(named)
        result = self.fn.run(*arguments, **keywords, **chosen.all_kwargs())
        self.nargs = None
        return result

    return run
