"""Exceptions of strobe. Every message has four parts: argument, got, expected, remedy."""

from __future__ import annotations

import builtins

# errors that a broken installation raises at an import or a kernel's compilation, besides Triton's own errors
BROKEN = (
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    NameError,
    SyntaxError,
    AssertionError,
)


def describe(argument: str, got: object, expected: str, remedy: str) -> str:
    """Format an error message.

    >>> describe("softcap", -1.0, "a finite number >= 0", "leave it out for none")
    'softcap: got -1.0, expected a finite number >= 0; leave it out for none'
    """
    return f"{argument}: got {got}, expected {expected}; {remedy}"


class InvalidProblem(ValueError):
    """The arguments of a call are invalid or contradict each other.

    >>> raise InvalidProblem("k", "3 heads", "a divisor of q's 8 heads", "repeat or group the heads")
    Traceback (most recent call last):
    ...
    strobe.errors.InvalidProblem: k: got 3 heads, expected a divisor of q's 8 heads; repeat or group the heads
    """

    def __init__(self, argument: str, got: object, expected: str, remedy: str):
        super().__init__(describe(argument, got, expected, remedy))
        self.argument = argument
        self.said = got, expected, remedy

    def __reduce__(self) -> tuple:  # by default pickle passes only the message to __init__, so unpickling fails
        return InvalidProblem, (self.argument, *self.said)

    def named(self, argument: str) -> InvalidProblem:
        """This error with another argument name, for a caller whose argument has that name.

        >>> str(InvalidProblem("cache.k", "3 heads", "2", "group them").named("k_cache"))
        'k_cache: got 3 heads, expected 2; group them'
        """
        return InvalidProblem(argument, *self.said)


class UnsupportedProblem(NotImplementedError):
    """The call is valid, but strobe cannot run it. If no kernel can run it, the message lists the reason of each
    kernel.
    """


class KernelFault(RuntimeError):
    """A kernel failed to compile or to launch. The message names the kernel, its config and the cause."""


def wrong_type(argument: str, got: object, expected: str, remedy: str) -> TypeError:
    """A TypeError with the message of `describe`. `got` is the offending object; the message names only its type."""
    kind = type(got)  # a type named like a builtin, such as numpy.bool, gets its module's name too
    name = (
        f"{kind.__module__}.{kind.__name__}"
        if hasattr(builtins, kind.__name__) and kind.__module__ != "builtins"
        else kind.__name__
    )
    return TypeError(describe(argument, name, expected, remedy))
