"""Plugin of pytest for compute-sanitizer (``-p tests.no_pool``): one allocation for each array.

CuPy's memory pool gives out pieces of larger blocks, in which a sanitizer sees no bounds.
"""

import cupy

cupy.cuda.set_allocator(None)
