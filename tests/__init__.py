"""NumPy and torch use one thread here and in processes that tests start, for pytest has a worker for each core. Products
of simulated tiles take four times as long if OpenBLAS divides them among threads that have no core. Where a test asks for
two threads, one that waits gives its core away: with OpenMP's busy waiting, tests of the CPU kernel's workers take seven
times as long.
"""

import os

for _name, _value in (("OPENBLAS_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive")):
    os.environ.setdefault(_name, _value)
