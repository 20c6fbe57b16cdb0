"""Streams and events of a GPU; on the CPU, where kernels are interpreted, everything has happened when it returns."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.backends.moves import DONE, Moved


class Moment:
    """See `Moved`: an event on a stream."""

    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # whoever waits sleeps: it is not the compute thread
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class Streams:
    """One for steps, and one each way for copies, so that copies and steps run beside each other."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.compute, self.outward, self.inward = (self._stream(device) for _ in range(3))

    def _stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is launched within goes to this stream."""
        return torch.cuda.stream(stream) if self.cuda else contextlib.nullcontext()

    def moment(self, stream: Any) -> Moved:
        """When all that was launched to this stream so far has been done."""
        return Moment(stream) if self.cuda else DONE

    def after(self, stream: Any, moment: Moved) -> None:
        """What is launched to this stream from now on runs after that moment. Nobody waits here."""
        if isinstance(moment, Moment):
            stream.wait_event(moment.event)

    def finish(self, stream: Any) -> None:
        """Wait until all that was launched to this stream has been done."""
        if self.cuda:
            stream.synchronize()
