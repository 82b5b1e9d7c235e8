"""The ladder: attention from three naive kernels to Hopper's tensor cores, one idea a file; `strobe ladder` runs it."""

RUNGS = ("k1", "k2", "t", "a", "k3_1", "k3_2", "k3_3", "k4_1", "k4_2", "k5", "k6", "k6_2", "decode", "k7", "k8")
