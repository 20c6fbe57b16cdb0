"""The activities: what a node does for a session, under the names that `workflows.contract` declares."""

from runtime.steps.activities import Steps
from runtime.steps.services import Services

__all__ = ["Services", "Steps"]
