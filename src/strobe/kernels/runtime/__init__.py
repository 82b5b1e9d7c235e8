"""What the host does for a launch, in all GPU kernels."""
