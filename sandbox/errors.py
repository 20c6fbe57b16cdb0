"""All errors of this package.

SandboxError
  SandboxUsageError            the caller's fault: asking again changes nothing
    BadSpec                    a limit, an id or a volume that cannot be
    BadArguments               a tool's arguments do not fit its schema
    BadPath                    a path leaves the workspace, or goes through a link
    FileMissing                no such file in the workspace
    KeyConflict                the call key was used for another command
    EgressRefused              a host may not be reached; the message says what it would take
    StaleEpoch                 a newer holder has taken the sandbox
  SandboxFailure               ours, or the machine's
    NoSandbox                  no backend can run here; the message says what to install
    CreateFailed               the backend refused or did not answer in time
    SandboxLost                the sandbox is gone, or does not answer
    SandboxBusy                at its process limit
    OperationFailed            the agent tried and the system refused (disk full, permission)
    BlobMissing                a snapshot names a blob that the store does not have
    BlobCorrupt                a blob's bytes are not what its name says
"""

from __future__ import annotations


class SandboxError(Exception):
    """Anything that this package raises."""


class SandboxUsageError(SandboxError):
    """The caller's fault."""


class BadSpec(SandboxUsageError, ValueError):
    """A limit, an id or a volume that cannot be."""


class BadArguments(SandboxUsageError, ValueError):
    """A tool's arguments do not fit its schema."""


class BadPath(SandboxUsageError, ValueError):
    """A path leaves the workspace, or goes through a link."""


class FileMissing(SandboxUsageError):
    """No such file in the workspace."""


class KeyConflict(SandboxUsageError):
    """The call key was used for another command."""


class EgressRefused(SandboxUsageError):
    """A host may not be reached; the message says what it would take."""


class StaleEpoch(SandboxUsageError):
    """A newer holder has taken the sandbox."""


class SandboxFailure(SandboxError):
    """Ours, or the machine's."""


class NoSandbox(SandboxFailure):
    """No backend can run here."""


class CreateFailed(SandboxFailure):
    """The backend refused or did not answer in time."""


class SandboxLost(SandboxFailure):
    """The sandbox is gone, or does not answer."""


class SandboxBusy(SandboxFailure):
    """The sandbox is at its process limit."""


class OperationFailed(SandboxFailure):
    """The agent tried and the system refused."""


class BlobMissing(SandboxFailure):
    """A snapshot names a blob that the store does not have."""


class BlobCorrupt(SandboxFailure):
    """A blob's bytes are not what its name says."""
