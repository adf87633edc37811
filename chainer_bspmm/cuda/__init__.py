"""CUDA without containers: kernel sources, launches, cuBLAS, and the step under capture."""
