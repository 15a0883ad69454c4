"""What a person reads when something is wrong: the exception class for their faults, what a disk refuses, and text that
is safe to show."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
REFUSED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class UserError(ValueError):
    """Becomes one line on stderr and exit status 2. Names the setting, what came, what is allowed and what to type.

    Anything else that is raised is our fault.
    """


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives an OSError from within, which knows no file after a failed write, the name of the one that is written."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def disk_fault(error: BaseException) -> UserError | None:
    """The line for a full or read-only disk and a file that may not be opened; None for every other error."""
    if not isinstance(error, OSError):
        return None
    if error.errno in FULL:
        hint = "" if error.errno == errno.EROFS else "; make room"
        return UserError(f"{error.filename or 'a file'} could not be written: {error.strerror}{hint}")
    if error.errno == errno.ENOENT and str(error.strerror).startswith("No usable temporary directory"):
        return UserError(f"{error.strerror}; make room in one of them, or name another in TMPDIR")
    if error.errno in REFUSED and error.filename is not None:
        return UserError(f"{error.filename} cannot be read or written: {error.strerror}")
    return None


def visible(text: str) -> str:
    r"""Control characters spelled out, \x1b, all but line break and tab: no text of a corpus, a name or a model moves
    the cursor, changes colours or turns the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) >= 160) else c.encode("unicode_escape").decode()
        for c in text
    )
