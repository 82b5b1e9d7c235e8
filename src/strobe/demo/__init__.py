"""The demo: real text through a real model, attention at growing length, and a report of both as one HTML file.

>>> import strobe.demo
>>> strobe.demo.main(quick=True)  # doctest: +SKIP
0
"""

from .run import main

__all__ = ["main"]
