"""Everything this package raises.

    TierError
    ├── TierUsageError      the caller's fault; asking again without a change fails again
    │   ├── TierConfigError     a size, path or fingerprint that cannot work
    │   └── TierBusyError       another process holds this arena
    └── TierFault           ours, or the machine's
        ├── TierIntegrityError  a conservation law does not hold
        └── TierClosedError     the stack was closed

Losing a page is not an error: it is a miss, a receipt that says so, and a counter. What tiers tell themselves
while they find out stays inside the package:

    FormatError             not a whole segment or manifest of ours: damage
    ForeignError            whole, of another format version: another release's
    UndecodableError        whole and ours, but written with a key or a library that is not here
    NoKeyError              the key ring has no key for a domain, so nothing of it is stored
    OSError                 storage failed; S3 clients' errors are turned into it
"""

from __future__ import annotations


class TierError(Exception):
    """Root of the tree."""


class TierUsageError(TierError, ValueError):
    """The caller asked for something that cannot be done as asked."""


class TierConfigError(TierUsageError):
    """A configuration that cannot work on this machine."""


class TierBusyError(TierUsageError):
    """Another process holds the host arena."""


class TierFault(TierError, RuntimeError):
    """Something broke on our side."""


class TierIntegrityError(TierFault):
    """Bookkeeping and storage disagree."""


class TierClosedError(TierFault):
    """The stack is closed."""


class FormatError(Exception):
    """These bytes are not a whole segment header or manifest of ours."""


class ForeignError(Exception):
    """Whole, but of another format version: of use to another release, so it is not damage."""


class UndecodableError(Exception):
    """Stored bytes that verify, but that this process cannot turn into a page."""


class NoKeyError(Exception):
    """The key ring has no key for this domain, so nothing of it may be stored."""
