"""Grammars at work: which tokens may come next; and texts that end a message."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from engine.errors import RequestError
from engine.sampler import Allowed
from engine.tokens import StopText, Tokenizer, load_tokenizer
from engine.tokens.grammar import MAX_GRAMMAR_CHARS, new_matcher

KEPT = 32  # grammars


class Constraint:
    """The state of one grammar in one generation. One thread at a time."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> Allowed | None:
        """bool [vocab] of the tokens that may come next; None when the grammar can go no further."""
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab).astype(np.bool_)
        return mask if mask.any() and not self._matcher.is_error() else None

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def back(self, count: int) -> None:
        """The last `count` tokens were not accepted."""
        if count:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """Tokens of the only text that may come next, as it is usually cut; none where there is a choice."""
        return list(self._matcher.compute_ff_tokens())

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come, one after the other."""
        return int(self._matcher.validate_tokens(list(tokens))) if tokens else 0


class Constraints:
    """Makes Constraints. The vocabulary's trie is built once, at the first grammar. Thread-safe."""

    def __init__(self, model_path: Path, vocab: int) -> None:
        self._path = model_path
        self._vocab = vocab
        self._lock = Lock()
        self._trie: Any = None
        self._tokenizer: Tokenizer | None = None  # made twice at worst, by two threads at once
        # Matchers at the beginning of their grammar; a session asks for the same one at every think.
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def build(self, grammar: str, replayed: Sequence[int] = ()) -> Constraint:
        """Compile a grammar and walk it over tokens generated before. Blocking; ~1 ms once the trie is built.

        Raises RequestError (bad_grammar) for a grammar that cannot be used or does not admit the replayed tokens.
        """
        matcher = self._begun(grammar)
        for index, token in enumerate(replayed):
            if not matcher.consume_token(token):
                raise RequestError("bad_grammar", f"replayed token {index} (id {token}) does not fit the grammar")
        return Constraint(matcher, self._vocab)

    def stop_text(self, stops: Sequence[str], replayed: Sequence[int] = ()) -> StopText:
        """What finds these texts in a message that has begun with the replayed tokens. Raises RequestError
        (bad_request) where they hold one already: that generation has ended."""
        watch = StopText(self._known_tokenizer(), stops)
        watch.push(replayed)
        if watch.found is not None:
            raise RequestError("bad_request", f"the replayed tokens end with the stop text {watch.found!r} already")
        return watch

    def knows(self, grammar: str) -> bool:
        """Whether `build` has nothing to compile."""
        return grammar in self._compiled

    def _begun(self, grammar: str) -> Any:
        """A matcher of its own at the beginning of the grammar."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
        matcher = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = matcher.deep_copy()
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: str) -> Any:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                "bad_grammar", f"a grammar of {len(grammar)} characters is more than the {MAX_GRAMMAR_CHARS} allowed"
            )
        matcher = new_matcher(self._vocabulary(), grammar)
        if matcher.is_error():
            reason = matcher.get_error().split("\n", 1)[0][:300]
            raise RequestError("bad_grammar", f"this grammar cannot be used: {reason}")
        return matcher

    def _vocabulary(self) -> Any:
        with self._lock:
            if self._trie is None:
                self._trie = _trie(self._known_tokenizer(), self._vocab)
            return self._trie

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token, which are control tokens, and how text is cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.piece(i, show_control=True) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)]

    def __call__(self, text: bytes | str) -> list[int]:
        written = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(written, allow_special=True)


def _trie(tokenizer: Tokenizer, vocab: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(wrapped, n_vocab=vocab, eos_token=list(tokenizer.eos_token_ids))
