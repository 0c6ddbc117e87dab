"""What to do about a path that cannot be used, by the error that the system gives."""

import errno

_OWN = "give yourself the right to it"
_TO_DO = {
    errno.EACCES: _OWN,
    errno.EPERM: _OWN,
    errno.EROFS: "give a path on a disk that can be written to",
    errno.EISDIR: "a folder is there: give the name of a file",
    errno.ENOTDIR: "a file is there where a folder should be: give another path",
    errno.EEXIST: "something else is there: give another path",
    errno.ENOTEMPTY: "give an empty or a new folder",
    errno.ENAMETOOLONG: "give a shorter name",
}


def what_to_do(error: OSError, otherwise: str = "look at the path with ls") -> str:
    """The hint for a person whose path led to this error."""
    return _TO_DO.get(error.errno or 0, otherwise)
