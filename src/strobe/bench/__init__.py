"""Measuring: suites of cases, rivals in the same process, medians with spread, JSON lines. Every published number comes from here.

cases (what) -> rivals (against whom) -> timer (how long) -> roofline (of what is possible) -> run (rows) -> table, plot.
"""
