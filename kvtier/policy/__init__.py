"""Which session's KV lies where: one rule, pure and replayable. Nothing here reads a clock or moves a byte."""

from kvtier.policy.cascade import Keep, Policy
from kvtier.policy.index import best_ttl_s, break_even_tokens, keep_rate
from kvtier.policy.keep import Expected, TierKeep
from kvtier.policy.log import Change, record, replay
from kvtier.policy.order import OVERTAKEN_AT_MOST, Waiting, first_served, left_s
from kvtier.policy.survival import Durations, Survival
from kvtier.policy.values import Move, Place, Prefill, Reason, SessionView, State, TierView, View

__all__ = [
    "OVERTAKEN_AT_MOST",
    "Change",
    "Durations",
    "Expected",
    "Keep",
    "Move",
    "Place",
    "Policy",
    "Prefill",
    "Reason",
    "SessionView",
    "State",
    "Survival",
    "TierKeep",
    "TierView",
    "View",
    "Waiting",
    "best_ttl_s",
    "break_even_tokens",
    "first_served",
    "keep_rate",
    "left_s",
    "record",
    "replay",
]
