"""Progress bars on terminals."""

import contextlib
import sys

from tqdm import tqdm


def _is_terminal(file):
    try:
        return file is not None and file.isatty()
    except (AttributeError, ValueError):  # another object, or a closed file
        return False


@contextlib.contextmanager
def progress(total, title):
    """Yield a function (n) that moves a bar n items ahead; without a terminal it does nothing."""
    # Even a disabled bar of tqdm starts a thread and makes a semaphore.
    if not _is_terminal(sys.stderr):
        yield lambda n: None
        return
    with tqdm(total=total, desc=title, leave=False) as bar:
        yield bar.update
