"""Times in requests: a day or a time as ISO 8601 writes it, in UTC where no zone is said."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator


def _written(value: Any) -> Any:
    if isinstance(value, str) and not re.match(r"\d{4}-\d\d-\d\d", value):
        raise ValueError("write a day or a time such as 2026-11-30 or 2026-11-30T12:00:00Z")
    if not isinstance(value, str | datetime.datetime):
        raise ValueError("give a time as a text, such as 2026-11-30T12:00:00Z")
    return value


def _in_utc(value: datetime.datetime) -> datetime.datetime:
    try:
        return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError("give a time of this era") from None


Time = Annotated[datetime.datetime, BeforeValidator(_written), AfterValidator(_in_utc)]
