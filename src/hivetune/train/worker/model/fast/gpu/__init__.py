"""The work between matrix products as Triton kernels: one source for ROCm and CUDA, tested in Triton's interpreter."""
