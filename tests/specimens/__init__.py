"""Small real Gluon kernels, one file each: what the simulator's tests run, what the ledger of mutants breaks, what a
GPU confirms.

Every file has `launch(...)`, which says what would run (kernel, grid, arguments, options, outputs full of NaN),
`run(...)`, which runs it on the tensors it is given (CPU tensors under the simulator, CUDA tensors on a GPU) and
returns the outputs, and `reference(...)`, the same in float64.
"""
