"""Why an activity was cancelled."""

from __future__ import annotations

from temporalio import activity


def is_unwanted() -> bool:
    """Whether the workflow asked for it, so that what the activity had begun must not go on. A step that goes on
    elsewhere, on another node or in another run of its workflow, finds it again where it is."""
    details = activity.cancellation_details()
    return details is not None and details.cancel_requested
