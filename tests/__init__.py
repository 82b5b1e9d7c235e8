"""NumPy and torch use one thread here and in processes that tests start. pytest has a worker for each core: products of
simulated tiles take four times as long if OpenBLAS divides them among threads that have no core.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
