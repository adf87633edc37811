"""CUDA and arrays, without containers: kernel sources, launches, cuBLAS, steps under capture."""
