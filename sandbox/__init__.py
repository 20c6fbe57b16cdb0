"""A place to run tools: one face over Docker, bubblewrap and a fake, and snapshots of workspaces.

driver = await choose_driver(home, run_dir)
handle = await driver.create(SandboxSpec("sandbox-1", "session-1", "tenant-1", epoch=1))
sandbox = await driver.attach(handle)
argv, stdin = tool_argv("bash", {"command": "echo hello"})
call = await sandbox.start("step-1/call-1", argv, stdin=stdin)
async for chunk in call: ...
result = await call.result()
root = await sandbox.snapshot(BlobStore(home / "blobs"))
await sandbox.close()
await driver.release(handle)
"""

from . import snapshots
from .agent.mask import Mask
from .archives import seed_tar
from .blobs import BlobStore
from .budget import Budget, Figures
from .choose import Choice, choose, choose_driver
from .client import Call
from .driver import Driver, Sandbox
from .egress import Denial, Egress
from .errors import (
    BadArguments,
    BadPath,
    BadSpec,
    BlobCorrupt,
    BlobMissing,
    CreateFailed,
    EgressRefused,
    FileMissing,
    KeyConflict,
    NoSandbox,
    OperationFailed,
    SandboxBusy,
    SandboxError,
    SandboxFailure,
    SandboxLost,
    SandboxUsageError,
    StaleEpoch,
)
from .fake import FakeDriver
from .gate import Gate
from .pool import Pool
from .shells import Ran, Shell
from .spec import (
    Chunk,
    Description,
    Entry,
    Handle,
    Limits,
    Restored,
    Result,
    Running,
    Said,
    SandboxSpec,
    Snapshot,
    Volume,
)
from .tools import TOOLS, BuiltinTool, tool_argv

__all__ = [
    "TOOLS",
    "BadArguments",
    "BadPath",
    "BadSpec",
    "BlobCorrupt",
    "BlobMissing",
    "BlobStore",
    "Budget",
    "BuiltinTool",
    "Call",
    "Choice",
    "Chunk",
    "CreateFailed",
    "Denial",
    "Description",
    "Driver",
    "Egress",
    "EgressRefused",
    "Entry",
    "FakeDriver",
    "Figures",
    "FileMissing",
    "Gate",
    "Handle",
    "KeyConflict",
    "Limits",
    "Mask",
    "NoSandbox",
    "OperationFailed",
    "Pool",
    "Ran",
    "Restored",
    "Result",
    "Running",
    "Said",
    "Sandbox",
    "SandboxBusy",
    "SandboxError",
    "SandboxFailure",
    "SandboxLost",
    "SandboxSpec",
    "SandboxUsageError",
    "Shell",
    "Snapshot",
    "StaleEpoch",
    "Volume",
    "choose",
    "choose_driver",
    "seed_tar",
    "snapshots",
    "tool_argv",
]
