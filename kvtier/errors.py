"""Everything this package raises.

    TierError
    ├── TierUsageError      the caller's fault; asking again without a change fails again
    │   ├── TierConfigError     a size, path or fingerprint that cannot work
    │   └── TierBusyError       another process holds this arena
    └── TierFault           ours, or the machine's
        ├── TierIntegrityError  a conservation law does not hold
        └── TierClosedError     the stack was closed

Losing a page is not an error: it is a miss, a receipt that says so, and a counter.
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
