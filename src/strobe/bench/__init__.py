"""Benchmarks: suites of cases, rival libraries in the same process, medians with quartiles, JSON lines. All published
numbers come from here.

The modules in order: cases -> rivals -> timer -> roofline (the device's limit) -> run (one row a case) -> table, plot.
"""
