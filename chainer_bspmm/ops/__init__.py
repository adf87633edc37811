"""Operations, each in a file or folder of its name: launch plan, GPU call, host formula, node.

``NAME_forward`` and ``NAME_backward`` work on bare arrays, on the device of the matrix or of the
first array, and trust their arguments. NAME, last in its file, takes variables and checks once. A
call launches on the current stream, does not synchronise and copies nothing to the device; arrays
that are not C-contiguous are copied first.
"""
