"""Device functions written once, called by Triton and by Gluon kernels."""
