"""The C++ kernels: their sources, how they are compiled (build.py), called (calls.py) and used (native.py)."""
