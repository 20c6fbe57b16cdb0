"""From a prompt to the pages it already has: on the device, in a tier, or nowhere.

tokens   |<------------------------- prompt ------------------------->|
pages    |  0  |  1  |  2  |  3  |  4  |  5  |  tail (partial)  |
found    |  device  | host | nvme | shared | hole: everything from here is computed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.backends.face import Logits
from engine.facts import PAGE_SIZE
from engine.pages import PagePool
from engine.request import Request
from engine.transfers import Page, Transfers, Waiter
from kvtier import Tier, next_key, page_keys


class PageHome(Protocol):
    """Where pages live."""

    @property
    def pool(self) -> PagePool: ...

    def copy(self, block: int, rows: int) -> int:
        """A block of one's own with the first `rows` rows of a held one, whose reference is given back."""
        ...


@dataclass(frozen=True)
class Tail:
    """A partial page: the first `rows` tokens of page number `page` of a prompt."""

    page: int
    rows: int
    key: bytes


@dataclass
class Ahead:
    """A step over tokens start..end that ran before the pages in front of them had verified (see `ahead`).

    coming: how many pages those are; fresh: blocks for its tokens beyond them
    ran: whether it came to its end; logits: of its last token, if that is the prompt's
    """

    coming: int
    start: int
    end: int
    fresh: list[int]
    ran: bool = False
    logits: Logits | None = None


@dataclass
class Search:
    """What a prompt could reuse: its whole pages by key, and those on the device, one reference each."""

    keys: list[bytes] = field(default_factory=list)
    root: bytes = b""
    tokens: tuple[int, ...] = ()
    held: dict[bytes, int] = field(default_factory=dict)  # key -> block
    returning: bool = False  # its pages may have been written elsewhere since the shared store was listed
    tail: Tail | None = None  # the longest partial page on the device that follows the held ones
    tail_below: Tail | None = None  # a longer one in a tier, at the first place that neither has a whole page for
    waiter: Waiter | None = None  # for what comes from the tiers
    ahead: Ahead | None = None

    def tails(self, page: int) -> list[Tail]:
        """Partial pages that could stand at a place, longest first. A session that went on had one where its
        new prompt has a whole page, so they are looked for at the first hole, not only at the end."""
        rows = self.tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        longest = min(len(rows), PAGE_SIZE - 1)
        parent = self.keys[page - 1] if page else self.root
        return [Tail(page, count, next_key(parent, rows[:count])) for count in range(longest, 0, -1)]


@dataclass
class Sources:
    """Where the prompt's KV came from, in tokens."""

    device: int = 0
    host: int = 0
    nvme: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.nvme + self.shared

    def by_tier(self) -> dict[Tier, int]:
        """Tokens restored, from the tiers that gave any."""
        counts = {Tier.HOST: self.host, Tier.NVME: self.nvme, Tier.SHARED: self.shared}
        return {tier: count for tier, count in counts.items() if count}


def chain(root: bytes, tokens: list[int] | tuple[int, ...]) -> Search:
    """Keys of the whole pages of `tokens`."""
    whole = len(tokens) // PAGE_SIZE * PAGE_SIZE
    keys = page_keys(root, tokens[:whole], PAGE_SIZE) if whole else []
    return Search(keys, root, tuple(tokens))


def search(request: Request, pool: PagePool, running: Iterable[Request] = ()) -> Search:
    """Find and hold everything of the prompt that is on the device, the last page of a running request included: who
    sends the same prompt, or a longer one, forks it without a copy."""
    tokens = tuple(request.tokens[: request.findable])
    found = Search(request.known_keys(), request.root, tokens, returning=request.returning)
    for key in found.keys:
        block = pool.acquire(key)
        if block is not None:
            found.held[key] = block
    leading = next((i for i, key in enumerate(found.keys) if key not in found.held), len(found.keys))
    for tail in found.tails(leading):
        block = pool.acquire(tail.key)
        if block is not None:
            found.held[tail.key] = block
            found.tail = tail
            break
    _share_running(found, leading, pool, running)
    return found


def _share_running(found: Search, page: int, pool: PagePool, running: Iterable[Request]) -> None:
    """Hold the partial page of a running request where it has more of the prompt than was found there."""
    rows = found.tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
    for request in running:
        at_page = request.root == found.root and len(request.keys) == page and len(request.blocks) > page
        if not at_page or request.keys[-1:] != found.keys[max(0, page - 1) : page]:
            continue
        theirs = request.tokens[page * PAGE_SIZE : request.computed]
        count = min(_common(rows, theirs), PAGE_SIZE - 1)
        if count <= (found.tail.rows if found.tail is not None else 0):
            continue
        if found.tail is not None:
            pool.release([found.held.pop(found.tail.key)])
        parent = found.keys[page - 1] if page else found.root
        found.tail = Tail(page, count, next_key(parent, rows[:count]))
        found.held[found.tail.key] = request.blocks[page]
        pool.share(request.blocks[page])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for count, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return count
    return min(len(left), len(right))


def missing(found: Search) -> bool:
    """Whether a tier could add anything."""
    if any(key not in found.held for key in found.keys):
        return True
    return any(tail.key not in found.held for tail in found.tails(len(found.keys))[:1])


def below(tiers: Transfers, found: Search, salt_id: bytes) -> list[Page]:
    """What the device lacks and the tiers have: whole pages up to the first hole, and the longest partial page there,
    if it is longer than what the device has in that place."""
    absent = [key for key in found.keys if key not in found.held]
    near = leading(absent, tiers.lookup(absent))
    there = {*found.held, *near}
    hole = next((i for i, key in enumerate(found.keys) if key not in there), len(found.keys))
    had = found.tail.rows if found.tail is not None and found.tail.page == hole else 0
    tails = [tail for tail in found.tails(hole) if tail.rows > had]
    places = tiers.lookup([tail.key for tail in tails])
    found.tail_below = next((tail for tail, place in zip(tails, places, strict=True) if place is not None), None)
    pages = [Page(key, PAGE_SIZE, salt_id) for key in near]
    if found.tail_below is not None:
        pages.append(Page(found.tail_below.key, found.tail_below.rows, salt_id))
    return pages


def has_hole(found: Search, pages: Sequence[Page]) -> bool:
    """Whether some whole page is neither on the device nor among those that come."""
    return len({*found.held, *(page.key for page in pages)} & set(found.keys)) < len(found.keys)


def leading(keys: Sequence[bytes], places: Sequence[Tier | None]) -> list[bytes]:
    """The keys before the first one that is in no tier."""
    count = next((i for i, place in enumerate(places) if place is None), len(keys))
    return list(keys[:count])


def adopt(request: Request, found: Search, home: PageHome) -> Sources:
    """Give the request its pages, up to the first hole; the last prompt token is always left to be computed."""
    sources = Sources()
    for key in found.keys:
        block = found.held.pop(key, None)
        if block is None:
            block = home.pool.acquire(key)  # another request may have computed it meanwhile
        if block is None:
            break
        _count(sources, found, key, PAGE_SIZE)
        request.blocks.append(block)
        request.keys.append(key)
    request.computed = len(request.blocks) * PAGE_SIZE
    _adopt_tail(request, found, sources)
    home.pool.release(found.held.values())
    found.held.clear()
    _leave_last_token(request, home)
    return sources


def _adopt_tail(request: Request, found: Search, sources: Sources) -> None:
    for tail in (found.tail_below, found.tail):  # the longer one first
        if tail is not None and tail.page == len(request.keys) and tail.key in found.held:
            request.blocks.append(found.held.pop(tail.key))
            request.computed += tail.rows
            _count(sources, found, tail.key, tail.rows)
            return


def _leave_last_token(request: Request, home: PageHome) -> None:
    """Logits need a query: if the whole prompt has its KV, the last token runs again, over a page of its own."""
    if request.computed < len(request.tokens):
        return
    request.computed = len(request.tokens) - 1
    rows = request.computed % PAGE_SIZE
    if rows == PAGE_SIZE - 1:
        request.keys.pop()
        request.blocks[-1] = home.copy(request.blocks[-1], rows)


def _count(sources: Sources, found: Search, key: bytes, tokens: int) -> None:
    """A page that another began to read counts as being on the device: it was read once."""
    tier = found.waiter.tiers.get(key) if found.waiter is not None else None
    if tier is None:
        sources.device += tokens
    elif tier is Tier.HOST:
        sources.host += tokens
    elif tier is Tier.NVME:
        sources.nvme += tokens
    else:
        sources.shared += tokens
