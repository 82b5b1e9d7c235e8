"""NumPy and torch use one thread here and in processes that tests start: pytest has a worker for each core. Products of
simulated tiles take four times as long if OpenBLAS divides them among threads that have no core. Where a test asks for
two threads, a thread that waits leaves its core to others: OpenMP's busy waiting makes the tests of the CPU kernel's
workers seven times as long on a busy machine.
"""

import os

for _name, _value in (("OPENBLAS_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive")):
    os.environ.setdefault(_name, _value)
