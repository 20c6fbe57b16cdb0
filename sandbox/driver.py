"""What every backend offers, and the sandbox it gives."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from . import earlier, workspace
from .blobs import BlobStore
from .client import NO_ENVIRONMENT, SPEAKS, Call, Channel, check_size, said, start_request
from .egress import Egress
from .errors import SandboxLost, SandboxUsageError
from .gate import Denied, Gate
from .spec import Description, Entry, Handle, Restored, Result, Running, Said, SandboxSpec, Snapshot

MAX_STDIN = 16 << 20
# Named here because `Sandbox.list` hides the built-in inside its class.
Names = list[str]
Entries = list[Entry]


class Sandbox:
    """A live sandbox, as seen over one connection. Any number of processes may hold one; the highest epoch rules.

    Every operation carries `epoch` (that of the handle, or the one given to `attach`): an operation of a lower epoch
    than the agent has seen raises StaleEpoch, a higher one fences all others off.
    """

    def __init__(self, handle: Handle, epoch: int | None = None, channel: Channel | None = None) -> None:
        self.handle = handle
        self._environment: dict[str, str] = json.loads(handle.extra.get("environment", "{}"))
        self._channel = channel or Channel(handle, handle.epoch if epoch is None else epoch)

    @property
    def epoch(self) -> int:
        return self._channel.epoch

    async def open(self) -> Sandbox:
        """Connects and fences. Raises SandboxLost or StaleEpoch."""
        try:
            header, _ = await self._channel.request("ping")
            self._channel.speaks = int(header.get("speaks", 1))
        except BaseException:
            await self.close()
            raise
        return self

    async def handed_to(self, handle: Handle, patience_s: float) -> Sandbox:
        """The same connection for the sandbox's next owner, whose epoch is higher; this object is done with.

        Raises SandboxLost where the agent does not answer.
        """
        self._channel.handle, self._channel.epoch = handle, handle.epoch
        await self._channel.request("ping", reply_s=patience_s)
        return Sandbox(handle, channel=self._channel)

    async def start(
        self,
        key: str,
        argv: Sequence[str],
        *,
        epoch: int | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] = NO_ENVIRONMENT,
        cwd: str = "/work",
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        stdin_open: bool = False,
        terminal: tuple[int, int] | None = None,
        keep_background: bool = False,
        secrets: Mapping[str, str] = NO_ENVIRONMENT,
    ) -> Call:
        """Starts a call, or finds the one that has this key: running (followed from its first byte) or finished.

        A key never runs twice in a sandbox. Raises KeyConflict where the key was used for another command, StaleEpoch,
        and SandboxBusy at the process limit. A sandbox that is gone gives a call whose result is "lost".

        With `stdin_open` the call is talked with: `write` and `read` it by its key, from any connection, until it ends
        or the sandbox is released. It has no deadline unless one is given, the last `output_bytes` of its output are
        kept, and the call returned here tells its end only. With a `terminal` of so many rows and columns it is talked
        with through one that controls it: ^C is b"\\x03", and both streams are one.

        A call is over when its command is; processes that it leaves behind are ended with it, and counted in its
        result. With `keep_background` they live on, until the key is killed or the sandbox restored or released.

        `secrets` are in the environment of this call only, and masked in all that it prints and in its journal, as they
        are and in base64. Other calls of the same sandbox run as the same user: they can read a running one's memory.
        """
        if terminal is not None:
            check_size(*terminal)
        stdin_open = stdin_open or terminal is not None
        if len(stdin) > MAX_STDIN:
            raise SandboxUsageError(f"stdin is {len(stdin)} bytes; at most {MAX_STDIN} fit: put it in a file")
        limits = self.handle.limits
        request = start_request(
            key,
            argv,
            self.epoch if epoch is None else epoch,
            {**self._environment, **env},
            cwd,
            limits.call_timeout_s if timeout_s is None and not stdin_open else timeout_s,
            limits.output_bytes if output_bytes is None else output_bytes,
            secrets,
        )
        request |= {"stdin_open": stdin_open, "terminal": terminal, "keep_background": keep_background}
        if self.is_earlier:
            request = earlier.request_of_first(request)
        call = Call(self._channel, key, request, stdin)
        await call.begun()
        return call

    async def write(self, key: str, data: bytes, *, once: str | None = None) -> bool:
        """Adds to the input of a call with an open one; True when the agent has taken all of it.

        A write named by `once` is taken once in the life of the call, whoever repeats it: then False. Raises
        OperationFailed where the input is closed, SandboxBusy where the call does not read what it has.
        """
        header, _ = await self._channel.request("write", data, key=key, once=once)
        return bool(header["written"])

    async def wrote(self, key: str, once: str) -> bool:
        """Whether a write of this name was taken."""
        header, _ = await self._channel.request("wrote", key=key, once=once)
        return bool(header["wrote"])

    async def close_stdin(self, key: str) -> None:
        """The call sees the end of its input once it has read what was written. Repeated: no error."""
        await self._channel.request("close", key=key)

    async def read(self, key: str, offset: int | None) -> Said:
        """What a call with an open input said from a byte on: waits until there is something, or the call's end.

        Without an offset it waits for nothing, and tells where the end is now.
        """
        return await said(self._channel, key, offset)

    async def lookup(self, key: str, *, output: bool = True) -> Result | Running | None:
        """What the journal knows of a key, with or without its output; None if it never started here."""
        header, body = await self._channel.request("lookup", key=key, output=output)
        if header["state"] == "finished":
            return Result(**header["result"], output=body)
        if header["state"] == "running":
            return Running(tuple(header["argv"]), header["elapsed_s"], body)
        return None

    async def resize(self, key: str, rows: int, columns: int) -> None:
        """Gives the terminal of a call another size; what runs in it is told."""
        check_size(rows, columns)
        await self._channel.request("resize", key=key, size=[rows, columns])

    async def kill(self, key: str, *, since: str | None = None) -> None:
        """Kills a call's whole tree, what it left in the background included. Unknown keys are no error.

        `since`: only what a call with an open input began after the write of this name; not the call's own process.
        """
        await self._channel.request("kill", key=key, since=since)

    @property
    def is_earlier(self) -> bool:
        """Whether its agent is of an earlier release: then only what began in it can be brought to an end."""
        return self._channel.speaks < SPEAKS

    async def pause(self) -> int:
        """Stops every process of the tools, whoever is connected, until `resume`; returns how many. Repeated: 0.

        Calls keep their state and their place: a start waits, and no deadline passes meanwhile. Files can be read and
        written, and snapshots taken.
        """
        header, _ = await self._channel.request("pause")
        return int(header["stopped"])

    async def resume(self) -> None:
        """Undoes `pause`; deadlines are later by as long as it lasted. Where nothing is paused: no error."""
        await self._channel.request("resume")

    async def busy(self) -> int:
        """How many calls have a process that runs, those that have ended but left something behind included."""
        header, _ = await self._channel.request("ping")
        return int(header["calls"])

    async def killall(self) -> Names:
        """Kills every process but the agent; returns "pid name" of each."""
        header, _ = await self._channel.request("killall")
        killed: Names = header["killed"]
        return killed

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file whole or not at all, its folders made. Paths are below /work, and no link is followed."""
        await workspace.put(self._channel, path, data, mode)

    async def get(self, path: str) -> bytes:
        """A regular file's bytes. Raises BadPath, FileMissing."""
        return await workspace.get(self._channel, path)

    async def list(self, path: str = "/work") -> Entries:
        """The names in a folder, sorted."""
        return await workspace.listing(self._channel, path)

    async def snapshot(self, store: BlobStore, *, verify: bool = False) -> Snapshot:
        """Freezes the tools, stores what changed in /work, thaws; returns the root's hash.

        Files whose inode, size and times are as they were are not read again; with `verify` all are, and the snapshot
        names those that had changed all the same.
        """
        if self.is_earlier:
            return await earlier.snapshot(self._channel, store)
        return await workspace.snapshot(self._channel, store, verify)

    async def restore(self, root: str, store: BlobStore, *, spare: bool = False) -> Restored:
        """Makes /work equal to `root` and nothing else; returns "pid name" of the processes this killed.

        `spare`: none is killed; what runs is stopped meanwhile, and goes on in the workspace as it is then.
        """
        if self.is_earlier:
            raise SandboxLost("its agent is of an earlier release and cannot restore this workspace")
        return await workspace.restore(self._channel, root, store, spare=spare)

    async def open_gate(self, egress: Egress, denied: Denied) -> Gate:
        """Lets tools out to what `egress` allows, until the gate is closed or anybody opens another; `denied` is told
        of what they were refused. Calls started from now on have the proxy in their environment.

        Raises SandboxLost, StaleEpoch.
        """
        return await Gate(self.handle, self.epoch, egress, denied).open()

    async def close(self) -> None:
        """Ends the connection. The sandbox and its calls go on; who still waits here for a call must re-attach."""
        await self._channel.close()


class Driver(Protocol):
    """A way to make sandboxes.

    `create` either returns a handle to a sandbox that answers, or leaves nothing behind and raises CreateFailed.
    `release` may be called any number of times, by any process, for a sandbox in any state. `found` looks at what
    really runs, not only at what was written down. `reap` removes every sandbox of this home that is not in `live`, or
    those of `among`. Where sandboxes are created meanwhile, ask for `found` first and then for what is live: a sandbox
    that is announced before it is created is then in both, or in neither.
    """

    name: str
    isolation: str

    async def create(self, spec: SandboxSpec) -> Handle: ...

    async def attach(self, handle: Handle, epoch: int | None = None) -> Sandbox:
        """Raises SandboxLost where the sandbox is gone, StaleEpoch where a newer holder has it."""
        ...

    async def release(self, handle: Handle) -> None: ...

    async def found(self) -> list[str]:
        """Ids of the sandboxes of this home that anything is there of, sorted."""
        ...

    async def reap(self, live: Collection[str], among: Collection[str] | None = None) -> list[str]: ...

    async def describe(self) -> Description: ...
