"""The demo: real text through a real model, attention at growing length, and a report of both as one HTML file.

>>> import examples.demo
>>> examples.demo.main(quick=True)  # doctest: +SKIP
0
"""

from .run import main

__all__ = ["main"]
