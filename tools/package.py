"""Build the sdist and the wheel: equal sources make equal files.

    python tools/package.py [DIRECTORY]        # default: dist

The times in both are SOURCE_DATE_EPOCH, or else the time of the last commit, or the sdist's time if
this is an unpacked sdist. setuptools uses it for the wheel. The sdist is rewritten, because its
members would have the time of the build, and the order and permissions of the files on disk.
"""

import glob
import gzip
import io
import os
import subprocess
import sys
import tarfile

CHECKOUT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def epoch():
    """Return the seconds since 1970 that stand for the time of the build."""
    if 'SOURCE_DATE_EPOCH' in os.environ:
        return int(os.environ['SOURCE_DATE_EPOCH'])
    if os.path.exists(os.path.join(CHECKOUT, '.git')):
        command = ['git', '-C', CHECKOUT, 'log', '-1', '--format=%ct']
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return int(os.path.getmtime(os.path.join(CHECKOUT, 'setup.cfg')))


def rewrite(path, seconds):
    """Rewrite an sdist with sorted members, one time, and no trace of this machine."""
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member)) for member in old.getmembers()]
        members.sort(key=lambda pair: pair[0].name)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode='w') as new:
            for member, content in members:
                info = tarfile.TarInfo(member.name)
                info.type, info.size, info.mtime = member.type, member.size, seconds
                info.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                new.addfile(info, content)
    with open(path, 'wb') as raw:
        with gzip.GzipFile(filename='', mode='wb', fileobj=raw, mtime=seconds) as f:
            f.write(packed.getvalue())


def main(directory='dist'):
    seconds = epoch()
    subprocess.run(
        [
            sys.executable,
            '-m',
            'build',
            '--no-isolation',
            '--quiet',
            '--outdir',
            directory,
            CHECKOUT,
        ],
        check=True,
        env={**os.environ, 'SOURCE_DATE_EPOCH': str(seconds)},
    )
    (sdist,) = glob.glob(os.path.join(glob.escape(directory), '*.tar.gz'))
    rewrite(sdist, seconds)


if __name__ == '__main__':
    main(*sys.argv[1:])
