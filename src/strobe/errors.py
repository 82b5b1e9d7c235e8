"""What strobe raises, and the one way its messages are built: what, got, expected, remedy."""

from __future__ import annotations

import builtins

# what an installation that is not whole raises, beside Triton's own errors: at an import, and where a kernel is compiled
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError, LookupError, NameError, SyntaxError, AssertionError)


def describe(argument: str, got: object, expected: str, remedy: str) -> str:
    """
    >>> describe("softcap", -1.0, "a finite number >= 0", "leave it out for none")
    'softcap: got -1.0, expected a finite number >= 0; leave it out for none'
    """
    return f"{argument}: got {got}, expected {expected}; {remedy}"


class InvalidProblem(ValueError):
    """The arguments of a call contradict each other or the contract.

    >>> raise InvalidProblem("k", "3 heads", "a divisor of q's 8 heads", "repeat or group the heads")
    Traceback (most recent call last):
    ...
    strobe.errors.InvalidProblem: k: got 3 heads, expected a divisor of q's 8 heads; repeat or group the heads
    """

    def __init__(self, argument: str, got: object, expected: str, remedy: str):
        super().__init__(describe(argument, got, expected, remedy))
        self.argument = argument
        self.said = got, expected, remedy

    def __reduce__(self) -> tuple:  # exceptions are pickled by their message alone otherwise, and could not be read in another process
        return InvalidProblem, (self.argument, *self.said)

    def named(self, argument: str) -> InvalidProblem:
        """The same of an argument that the caller knows by another name.

        >>> str(InvalidProblem("cache.k", "3 heads", "2", "group them").named("k_cache"))
        'k_cache: got 3 heads, expected 2; group them'
        """
        return InvalidProblem(argument, *self.said)


class UnsupportedProblem(NotImplementedError):
    """The call is meaningful, but nothing here can run it: the message lists every kernel and what it has against it."""


class KernelFault(RuntimeError):
    """A kernel failed to compile or launch: the message names the kernel, its config and the cause."""


def wrong_type(argument: str, got: object, expected: str, remedy: str) -> TypeError:
    """A TypeError in the words of `describe`; `got` is the offending object and only its type is named."""
    kind = type(got)
    name = f"{kind.__module__}.{kind.__name__}" if hasattr(builtins, kind.__name__) and kind.__module__ != "builtins" else kind.__name__
    return TypeError(describe(argument, name, expected, remedy))  # numpy.bool is no bool
