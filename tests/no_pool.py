"""pytest plugin (``-p tests.no_pool``) for compute-sanitizer: one allocation per array.

CuPy's memory pool hands out pieces of larger blocks, inside of which a sanitizer sees no bounds.
"""

import cupy

cupy.cuda.set_allocator(None)
