"""A file system of a few MiB, and another program that takes every byte of it. The fixture `small_disk` mounts it."""

import errno
from pathlib import Path


def fill(folder: Path) -> Path:
    """Write until nothing fits, not even what is smaller than a block; the file that took it all."""
    path = folder / "other-program"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path
