"""What knows CUDA and arrays, and no container: sources, launches, cuBLAS, steps under capture."""
