"""The agent's loop: connections, calls, timers and the operations a controller may ask for."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .calls import Call
from .egress import WayOut
from .errors import Refused
from .processes import below, processes, proportional_bytes, resident_bytes, send_signal
from .runs import SPARE_S, TICK_S
from .shepherd import make_room
from .talks import Talks
from .wire import Broken, Connection

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 4, 38, 22, 36
SPEAKS = 2  # of this protocol, as its answers to a ping say; the first one said nothing
LIBC = ctypes.CDLL(None, use_errno=True)
Json = dict[str, Any]


def harden(filter_hex: str) -> None:
    """Closes this process to its tools: no ptrace, no /proc/self of ours, and the system call filter for all."""
    make_room()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one signal with a handler, so the one a tool could end us with
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if filter_hex:
        code = bytes.fromhex(filter_hex)
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0):
            raise OSError(ctypes.get_errno(), "the system call filter was refused")


class Agent(Talks):
    """Single-threaded: nothing here may wait for a tool or for the controller."""

    def __init__(self, listener: socket.socket, config: Json) -> None:
        super().__init__(config)
        self.listener = listener
        self.epoch = int(config["epoch"])
        self.connections: set[Connection] = set()
        self.alone_since = time.monotonic()
        self.held: list[tuple[Connection, Json, bytes]] = []  # starts that came while the tools were frozen
        self.paused: list[int] = []
        self.mishaps = 0
        self.files_seen = 0
        self.way_out = WayOut(self.selector, self.rearm, self.drop)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        self.wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(woken, selectors.EVENT_READ, lambda _: self.reap(woken))

    # The loop

    def run(self) -> None:
        while True:
            for key, mask in self.selector.select(self.patience()):
                self.handle(key.data, mask)
            now = time.monotonic()
            for call in [call for call in self.on_the_clock() if call.deadline <= now]:
                call.deadline = now + 3600
                self.end_tree(call, "timeout")
            if self.shepherds and now >= self.look_again:
                self.look_again = now + TICK_S
                self.watch()
            if self.spare is None and now >= self.spare_at:
                self.spare_at = now + TICK_S
                self.make_spare()
            if not self.connections and now - self.alone_since > self.config["ttl_s"]:
                self.kill_all()
                return

    def handle(self, callback: Callable[[int], None], mask: int) -> None:
        """A defect of ours must cost one event, not the sandbox; but not for ever."""
        try:
            callback(mask)
        except Exception:
            traceback.print_exc()
            self.mishaps += 1
            if self.mishaps > 100:
                raise

    def patience(self) -> float:
        """How long to wait for events: until the next deadline of a call that still runs, or the next look around."""
        if not self.shepherds:
            return 1.0 if self.spare else SPARE_S
        deadlines = [call.deadline for call in self.on_the_clock()]
        return max(0.0, min([TICK_S, *(deadline - time.monotonic() for deadline in deadlines)]))

    def on_the_clock(self) -> list[Call]:
        running = [call for call in self.shepherds.values() if call.result is None]
        return running if self.paused_at is None else []

    def accept(self, _: int) -> None:
        try:
            sock, _address = self.listener.accept()
        except OSError:
            return
        pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        # A peer outside our pid namespace has no pid in it; a tool always has one.
        if pid != 0 if self.config["outside_only"] else uid != os.getuid():
            sock.close()
            return
        connection = Connection(sock, self.config["token"])
        self.connections.add(connection)
        self.selector.register(sock, selectors.EVENT_READ, lambda mask: self.serve(connection, mask))

    def serve(self, connection: Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if mask & selectors.EVENT_READ:
                for header, body in connection.receive():
                    if connection.known:
                        self.answer(connection, header, body)
                    else:
                        connection.greet(header)
            self.rearm(connection)
        except (Broken, ValueError):
            self.drop(connection)
        except Exception:
            self.drop(connection)  # whoever waits there learns of it at once
            raise

    def rearm(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        if connection not in self.connections:
            return
        key = self.selector.get_key(connection.sock)
        if key.events != events:
            self.selector.modify(connection.sock, events, key.data)

    def drop(self, connection: Connection) -> None:
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.selector.unregister(connection.sock)
        connection.sock.close()
        self.thaw(connection)
        self.abandon_uploads(connection)
        for call in self.calls.values():
            call.subscribers = [pair for pair in call.subscribers if pair[0] is not connection]
        self.hang_up(connection)
        self.way_out.leave(connection)
        self.alone_since = time.monotonic()

    def answer(self, connection: Connection, header: Json, body: bytes) -> None:
        try:
            self.fence(int(header["epoch"]))
            operation = self.operations().get(header.get("op", ""))
            if operation is None:
                raise Refused("request", f"unknown operation {header.get('op')!r}")
            if header["op"] == "start" and header["key"] not in self.calls and self.stands_still():
                self.held.append((connection, header, body))
                return
            reply = operation(connection, header, body)
        except Refused as error:
            reply = {"error": error.code, "message": str(error)}, b""
        except FileNotFoundError as error:
            reply = {"error": "missing", "message": f"{header.get('path') or error.filename}: no such file"}, b""
        except OSError as error:
            reply = {"error": "os", "message": f"{header.get('path') or header.get('op')}: {error.strerror}"}, b""
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reply = {"error": "request", "message": f"{header.get('op')}: {type(error).__name__}: {error}"}, b""
        if reply is not None:
            connection.send({"id": header.get("id"), **reply[0]}, reply[1])

    def stands_still(self) -> bool:
        return self.paused_at is not None or any(each.freezing for each in self.connections)

    def fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Refused("epoch", f"epoch {epoch} is over; this sandbox is held by epoch {self.epoch}")
        if epoch > self.epoch and self.way_out.exit is not None:
            self.drop(self.way_out.exit)  # nothing leaves through a holder that was fenced off
        self.epoch = epoch

    def spawn(self, header: Json, digest: str, stdin: bytes) -> Call:
        return super().spawn({**header, "env": {**self.way_out.environment(), **header["env"]}}, digest, stdin)

    def operations(self) -> dict[str, Callable[[Connection, Json, bytes], tuple[Json, bytes] | None]]:
        return {
            "ping": lambda *_: ({"speaks": SPEAKS, "epoch": self.epoch, "calls": len(self.shepherds)}, b""),
            "start": self.op_start,
            "lookup": self.op_lookup,
            "kill": self.op_kill,
            "killall": lambda *_: ({"killed": self.kill_all()}, b""),
            "freeze": self.op_freeze,
            "pause": self.op_pause,
            "resume": self.op_resume,
            "thaw": lambda connection, *_: self.thaw(connection),
            "exit": self.way_out.op_exit,
            "relay": self.way_out.op_relay,
            **self.talk_operations(),
            **self.file_operations(),
        }

    def op_freeze(self, connection: Connection, header: Json, body: bytes) -> tuple[Json, bytes]:
        connection.freezing = True
        connection.frozen += self.freeze(self.everything)
        return {"frozen": len(connection.frozen)}, b""

    def op_pause(self, connection: Connection, header: Json, body: bytes) -> tuple[Json, bytes]:
        """Like freezing, but for everybody, until somebody resumes."""
        if self.paused_at is None:
            self.paused_at = time.monotonic()
        known = set(self.paused)
        stopped = [pid for pid in self.freeze(self.everything) if pid not in known]
        self.paused += stopped
        return {"stopped": len(stopped)}, b""

    def op_resume(self, connection: Connection, header: Json, body: bytes) -> tuple[Json, bytes]:
        paused, self.paused = self.paused, []
        if self.paused_at is not None:
            for call in self.shepherds.values():
                call.deadline += time.monotonic() - self.paused_at
            self.paused_at = None
        for pid in paused:
            send_signal(pid, signal.SIGCONT)
        self.begin_held()
        return {}, b""

    def thaw(self, connection: Connection) -> tuple[Json, bytes]:
        for pid in connection.frozen:
            send_signal(pid, signal.SIGCONT)
        if connection.freezing:
            self.workspace.relock()
        connection.frozen, connection.freezing = [], False
        self.begin_held()
        return {}, b""

    def begin_held(self) -> None:
        held, self.held = self.held, []
        for waiting, header, body in held:
            if waiting in self.connections:
                try:
                    self.answer(waiting, header, body)
                except Broken:
                    self.drop(waiting)  # it has gone meanwhile: nobody else's affair

    def reap(self, woken: socket.socket) -> None:
        with suppress(BlockingIOError):
            woken.recv(4096)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.going.discard(pid)
            call = self.shepherds.get(pid)
            if call is not None:
                self.bury(call)
            elif self.spare is not None and pid == self.spare.pid:
                self.spare.line.close()
                self.spare = None

    def watch(self) -> None:
        """Memory where the kernel does not count it for us, and files beyond number."""
        table = processes()
        trees = {pid: below({pid}, table) for pid in self.shepherds}
        limit = self.config["memory_bytes"]
        used = {pid: resident_bytes(tree) for pid, tree in trees.items()}
        if sum(used.values()) > limit:  # counts a page once per process that shares it; the exact number costs more
            used = {pid: proportional_bytes(tree) for pid, tree in trees.items()}
        if sum(used.values()) > limit:
            self.end_tree(self.shepherds[max(used, key=lambda pid: used[pid])], "oom")
        self.watch_files()

    def watch_files(self) -> None:
        """Empty files cost kernel memory that no tmpfs size counts. Removing them must stay possible."""
        count = self.count_files()
        if count > self.config["max_files"] and count > self.files_seen:
            for call in list(self.shepherds.values()):
                self.end_tree(call, "oom")
            count = self.count_files()
        self.files_seen = count

    def count_files(self) -> int:
        stats = [os.statvfs(path) for path in self.config["tmpfs"]]
        return sum(each.f_files - each.f_ffree for each in stats)
