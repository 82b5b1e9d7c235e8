"""The ladder: attention from three naive kernels to Hopper's tensor cores, one idea a file; `python -m ladder` runs
it."""
