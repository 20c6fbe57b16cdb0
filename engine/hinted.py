"""Hints of others, acted upon as intents."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from engine.errors import RequestError
from engine.hints import Envelope, Hint
from engine.intents import Intents
from engine.reports import Reply

_HINTS_KEPT = 4096


class Hinted:
    """Runs on the compute thread, between steps."""

    def __init__(self, intents: Intents) -> None:
        self._intents = intents
        self._done: OrderedDict[tuple[str, int, Hint], dict[str, Any]] = OrderedDict()

    def act(self, envelope: Envelope, reply: Reply) -> None:
        """Act on hints, one receipt per hint, in their order. A hint that came before is answered as it was then; one
        that says something else under the same message id is another sender's."""
        receipts: list[dict[str, Any]] = [{} for _ in envelope.hints]
        left = len(receipts)

        def answered(place: int, receipt: dict[str, Any]) -> None:
            nonlocal left
            receipts[place] = self._done[(envelope.message_id, place, envelope.hints[place])] = receipt
            while len(self._done) > _HINTS_KEPT:
                self._done.popitem(last=False)
            left -= 1
            if not left:
                reply({"receipts": receipts})

        for place, hint in enumerate(envelope.hints):
            before = self._done.get((envelope.message_id, place, hint))
            if before is not None:
                answered(place, before)
            else:
                self._hint(hint, partial(answered, place))
        if not receipts:
            reply({"receipts": []})

    def _hint(self, hint: Hint, then: Reply) -> None:
        def answer(receipt: dict[str, Any]) -> None:
            status = "clipped" if hint.note and receipt["status"] == "accepted" else receipt["status"]
            detail = "; ".join(text for text in (receipt["detail"], hint.note) if text)
            then({**receipt, "action_id": hint.action_id, "status": status, "detail": detail})

        refused = {"status": "rejected", "pages": 0, "bytes": 0, "ms": 0.0, "detail": hint.refusal, "tier": None}
        if hint.call is None:
            answer(refused)
            return
        known = self._intents.epoch(hint.call.session)
        if hint.call.epoch > known:  # advice ends nobody's lease: only an owner does
            detail = f"session {hint.call.session!r} is at epoch {known}; epoch {hint.call.epoch} was not seen here yet"
            answer({**refused, "detail": detail})
            return
        try:
            self._intents.handle(hint.call, answer)
        except RequestError as error:
            answer({**refused, "detail": str(error)})
