"""The C++ kernels: their sources, how they are compiled (build.py); backend.py calls them."""
