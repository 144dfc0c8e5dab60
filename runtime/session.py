"""One sequence: a target context, a drafter, and the generations that run on them one after another.

Thin Python around the native session: one call per piece of the prompt and at most one per round, with the GIL released inside.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
import weakref
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _native, session_file
from .checkpoints import LEAST_KEPT, OPENING, checkpoint_places
from .errors import LibraryError, LoadError, PromptError, SessionError, SessionFileError
from .sampling import Chooser, Sampling, TokenLogprobs, address, make_chooser, rule_of
from .stats import Stats
from .weights import Settings, free_context, make_target_context

if TYPE_CHECKING:
    from .llm import Model

N_PIECE = 256  # prompt tokens per native call: Ctrl-C and cancel() act between pieces
READ_S = 1.0  # of rounds per native call where nobody waits for each; Ctrl-C acts within a tenth of a second
DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True)
class Scripted:
    """The drafter of tests: it knows the target's text (`tokens`, by position) and is right `n_right` times per draft.

    `hidden_rows`: the target hands them out as for a head.
    """

    tokens: Sequence[int]
    n_right: int
    hidden_rows: bool = True


class Session:
    """KV cache, drafter and sampler of one sequence; made by `Model.session()`.

    A session serves one generation at a time. A new `generate` on the thread that left an earlier one unfinished ends
    that one; on another thread it raises, unless that one was cancelled or its thread has ended.

    A prompt costs only what is new: what it shares with the one before and its text is kept, in the target's cache and in the
    drafter's, as far as the target can go back there. One with attention alone can go back to any token, a recurrent or hybrid one
    to its checkpoints, which are made where messages end (checkpoints.py).

    Args:
        depth: drafts per round at most; 0 makes a plain session, without rollback slots and hidden rows.
        pace: chooses the depth of each round; without it every round drafts `depth` tokens.
        learn: count the tokens that are written (see `Model.count`).
        n_slots: rollback slots for a recurrent target (default: as many as `depth`).
        n_checkpoints: of a recurrent target, how many may be kept.
        scripted: a scripted drafter in place of the model's own.
    """

    def __init__(
        self,
        model: Model,
        *,
        settings: Settings,
        n_ctx: int,
        depth: int,
        why: str,
        pace: _native.Pacing | None = None,
        learn: bool = False,
        n_slots: int | None = None,
        n_checkpoints: int = 0,
        scripted: Scripted | None = None,
    ) -> None:
        self.model = model
        self.pace = pace
        self.depth = depth
        self.why = why
        self.n_ctx = n_ctx
        self.kind: str | None = None
        self._draft_vocab: _native.DraftVocab | None = None
        self._settings = settings
        self._rules = _native.RuleChoice()
        self._learn = learn
        self._tried_plain_context = False
        self._lock = threading.RLock()  # held while it is settled whose text is the session's
        self._cancelled = False
        self._owner: threading.Thread | None = None
        self._current: Generation | None = None
        # What the native session holds, and the token that it has not decoded yet; None while that is uncertain.
        self._history: list[int] | None = []
        self._n_prompt = 0  # of it: how many were a prompt's
        self._n_checkpoints = n_checkpoints
        self._rewritten = False  # whether a prompt had another answer in it than was given
        self._n_piece = min(N_PIECE, settings.batch, n_ctx)
        # Freed together and in order, by close() or with the last reference; the weights are held until then.
        self._natives: list[Any] = []
        self._contexts = contexts = list[Any]()
        weights = (model.weights, model.head_weights)
        self._free = weakref.finalize(self, _free_session, self._natives, contexts, weights)
        self._free.atexit = False  # llm.py sees to that, when no thread computes
        try:
            widths = model.widths(n_ctx)
            # Numbers of rows in a decode whose logits agree; none: any number of rows.
            self.widths = tuple(w for w in widths if w <= max(depth + 1, widths[0]))
            n_more = max([depth + 1, *self.widths]) - 1  # rows beside the first
            n_slots = n_more if n_slots is None else n_slots
            target = make_target_context(model.weights, settings, n_ctx=n_ctx, depth=n_more, n_slots=n_slots)
            contexts.append(target)
            options: dict[str, Any] = {}
            if depth and scripted is not None:
                self.kind = "scripted"
                options = {"kind": "scripted", "script": list(scripted.tokens), "n_right": scripted.n_right}
                options["hidden_rows"] = scripted.hidden_rows
            elif depth:
                self.kind = model.kind
                options = {
                    "kind": model.drafter,
                    "min_confidence": model.min_confidence,
                    "looks_up": pace is not None and model.ngram,
                }
                draft = model.make_draft_context(settings, n_ctx=n_ctx, target=target)
                if draft is not None:
                    contexts.append(draft)
                    options["draft_ctx"] = address(draft)
                options["picks_on_backend"] = model.picks_on_backend
                self._draft_vocab = model.draft_vocab
            with model.turns:  # it may compute
                options |= {"vocab": self._draft_vocab, "n_checkpoints": n_checkpoints}
                self._natives.append(_native.Session(address(target), **options))
                if self.widths:
                    self._set_widths()
        except BaseException:  # its traceback would keep the contexts longer than the weights may live
            self._free()
            raise

    # Generating

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | str = (),
        depth: int | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        accept: str = "auto",
        preserved_tokens: Collection[int] = (),
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Generation:
        """Completes `prompt` as it stands and streams the text.

        Args:
            prompt: text, or token ids.
            max_tokens: tokens to emit at most (default 512; the context's end also ends it).
            stop: strings that end the text; they are not part of it.
            depth: drafts per round, at most the session's own; None leaves it to the session's pace, if it has one.
            ignore_eos: go on past the end-of-text token (benchmarks).
            logprobs: keep each token's log-probability, and those of so many likeliest ones, in `Generation.logprobs`.
            accept: which drafts stand above temperature 0: "match" (those that plain decoding with the same seed draws), "reject"
                (speculative sampling: the same distribution, other draws, more drafts stand; a seed gives the same text again only with
                the same depths, and a head whose rows do not change), or "auto": the faster one here,
                and "match" where a seed is given.
            preserved_tokens: control tokens that the text has as the file spells them (`Vocab.control_tokens`); of others it has nothing.
            sampling: how tokens are chosen; by default as the file says, else greedily.
            options: any setting of `Sampling` (temperature, top_k, seed, grammar, ...), over those; None leaves it as it is.

        Raises:
            PromptError: an empty prompt, one longer than the context, an option unknown or out of range.
            SessionError: the session is closed, or generating in another thread.

        Example:
            >>> "".join(session.generate("def add(a, b):", max_tokens=16))      # doctest: +SKIP
        """
        tokens = self.model.vocab.tokenize(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        settings = (sampling or self.model.sampling).with_options(**options)
        self._check_prompt(tokens)
        for name, value, least in (
            ("max_tokens", max_tokens, 1),
            ("depth", depth, 0),
            ("logprobs", logprobs, 0),
        ):
            if value is not None and not (isinstance(value, int) and value >= least):
                raise PromptError(f"{name} {value!r} is not a whole number of at least {least}")
        try:
            stop = [stop] if isinstance(stop, str) else list(stop)
            "".join(stop).encode()
        except (TypeError, UnicodeEncodeError):
            raise PromptError(f"stop strings {stop!r} are not all text") from None
        if (
            bad := next((t for t in preserved_tokens if not 0 <= t < self.model.vocab.n_tokens), None)
        ) is not None:
            raise PromptError(
                f"preserved_tokens has {bad}, which is outside the vocabulary of {self.model.vocab.n_tokens}"
            )
        pace = self.pace if depth is None else None
        depth = self.depth if depth is None else min(depth, self.depth)
        rule = rule_of(accept, settings) if depth else rule_of("match", settings)
        if self.widths and rule == "reject":
            raise PromptError(
                "accept 'reject' draws other tokens than plain decoding, whose tokens exact decoding promises: leave one "
                "of them out"
            )
        rule = "match" if self.widths else rule
        request = _Request(
            tokens=tokens,
            chooser=make_chooser(
                settings,
                self.model.vocab,
                tokens,
                self.n_ctx,
                n_logprobs=logprobs,
                rule=rule,
                rules=self._rules,
            ),
            rule=rule,
            max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
            stop=stop,
            depth=depth,
            pace=pace,
            ignore_eos=bool(ignore_eos),
            preserved={token: self.model.vocab.spelling(token) for token in preserved_tokens},
        )
        return self._start(request)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answers a conversation through the file's chat template; options as in `generate`.

        Example:
            >>> "".join(session.chat([{"role": "user", "content": "Hi"}]))       # doctest: +SKIP
        """
        return self.generate(self.model.vocab.chat_tokens(messages), **options)

    def generate_synthetic(
        self, prompt: Sequence[int], *, p_accept: float, max_tokens: int, seed: int = 0
    ) -> Generation:
        """For benchmarks: each draft stands by a coin toss of probability `p_accept`; the depth is pace's, or the session's.

        The text is meaningless.
        """
        tokens = _token_ids(prompt)
        self._check_prompt(tokens)
        if not 0 <= p_accept <= 1:
            raise PromptError(f"an acceptance of {p_accept} is not between 0 and 1")
        chooser = Chooser(_native.coin_chooser(p_accept, seed))
        request = _Request(tokens, chooser, max_tokens, [], self.depth, self.pace, ignore_eos=True)
        return self._start(request)

    def time_rows(self, tokens: Sequence[int], n_rows: int, repeats: int) -> list[float]:
        """For benchmarks: seconds of each of `repeats` decodes of `n_rows` rows, all of them output; the first is warm-up.

        The rows are `tokens`, over and over, behind what the session holds; its next prompt starts anew.

        Raises:
            PromptError: a token outside the vocabulary.
            SessionError: more rows than a verification here has; the session is closed, or generating elsewhere.
        """
        self._check_prompt(list(tokens))
        n_most = min(self.depth + 1, self._settings.batch, self.n_ctx)
        if not 1 <= n_rows <= n_most:
            raise SessionError(f"{n_rows} rows in a decode: this session has 1 to {n_most}")
        with self._lock:
            self._check_taken()
            self._end_current()
            self._check_open()
            with self.model.turns:
                self._history = None
                self._native.use_plain(False)  # the plain context has one output row
                try:
                    return list(self._native.time_rows(list(tokens), n_rows, repeats))
                finally:
                    _native.release_team()

    def cancel(self) -> None:
        """Ends the running generation after its current round or piece of prompt. From any thread."""
        self._cancelled = True  # a plain flag: a signal handler may set it at any moment
        native = self._native  # another thread may close it meanwhile
        if native is not None:
            native.cancel()

    # In a file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what the session holds to a file, for `Model.session(restore=path)` to go on from, and goes on itself.

        That is the target's state, the drafter's with the rows that wait for it, and the tokens. A text that is being written
        ends here. A sampler is a text's own, made of its options and seed, so there is none to save.

        Args:
            path: replaced where it exists, whole or not at all.

        Raises:
            SessionError: the session holds no text or is not sure of it, is closed, or generating in another thread.
            SessionFileError: the file cannot be written.

        Example:
            >>> session.save("talk.session")                                     # doctest: +SKIP
        """
        with self._lock:
            self._check_taken()
            self._end_current()
            self._check_open()
            if not self._history or self._native.dirty or self._native.n_past != len(self._history) - 1:
                raise SessionError(
                    "there is nothing to save: the session holds no text, or its last one failed"
                )
            with self.model.turns:
                target, drafter = self._native.save()
            flash_attn = self._settings.flash_attn
            origin = session_file.Origin.of(self.model, self.n_ctx, self.kind, flash_attn)
            session_file.write(path, session_file.SavedSession(origin, self._history, target, drafter))

    def _restore(self, path: str | os.PathLike[str], saved: session_file.SavedSession) -> None:
        """Goes on from what the file holds: for a new session."""
        here = session_file.Origin.of(self.model, self.n_ctx, self.kind, self._settings.flash_attn)
        if bad := [token for token in saved.tokens if not 0 <= token < self.model.vocab.n_tokens]:
            raise SessionFileError(
                f"{path} has token id {bad[0]}, the vocabulary {self.model.vocab.n_tokens}"
            )
        is_same_head = (saved.origin.kind, saved.origin.head) == (here.kind, here.head)
        try:
            with self.model.turns:
                self._native.adopt(saved.tokens)
                self._native.restore(saved.target, saved.drafter if is_same_head else b"", saved.tokens)
        except (LibraryError, ValueError) as error:
            why = str(error)
            if (was := saved.origin.flash_attn) != here.flash_attn:
                why += f"; it was saved with flash attention {was}, this session's is {here.flash_attn} (--flash-attn {was})"
            raise SessionFileError(f"{path} cannot be restored: {why}") from error
        finally:
            _native.release_team()
        self._history = saved.tokens

    # Lifetime

    @property
    def closed(self) -> bool:
        return not self._natives

    @property
    def held(self) -> list[int]:
        """Token ids that the session holds, of the last prompt and its text; empty while that is uncertain."""
        return list(self._history or ())

    @property
    def n_restores(self) -> int:
        """How often a rewind needed the checkpoint, for want of rollback slots."""
        self._check_open()
        return int(self._native.n_restores)

    @property
    def checkpoints(self) -> list[tuple[int, int]]:
        """Positions that a recurrent or hybrid target can go back to, and the bytes that are kept for each."""
        self._check_open()
        with self.model.turns:
            return list(self._native.checkpoints)

    def close(self) -> None:
        """Ends its text and frees the contexts. Idempotent; raises SessionError while another thread generates on it."""
        with self._lock:
            self._end_current()
            _free_session(self._natives, self._contexts)  # interrupted, another close() goes on

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)

    # Inside

    def _hold(self, tokens: list[int]) -> int:
        """Goes back to where a prompt leaves what is held; how many of its tokens need not be decoded."""
        native, held, self._history = self._native, self._history, None
        if held is None or native.dirty:
            native.clear()
            return 0
        n_same = next(
            (i for i, (ours, theirs) in enumerate(zip(held, tokens, strict=False)) if ours != theirs),
            min(len(held), len(tokens)),
        )
        n_past = int(native.n_past)
        if n_past <= n_same and n_past < len(tokens):
            return n_past
        self._rewritten |= n_same >= self._n_prompt - OPENING
        if n_same <= LEAST_KEPT:
            native.clear()
            return 0
        return int(native.go_back(n_same - 1))  # its last token comes again, as go_back() wants

    def _checkpoint_places(self, tokens: list[int], n_held: int) -> list[int]:
        if not (self._n_checkpoints and self._native.recurrent):
            return []
        return checkpoint_places(tokens, n_held, self.model.vocab.is_eog, rewritten=self._rewritten)

    def _set_widths(self) -> None:
        """Of the widths those whose rows can be taken back from a recurrent state by rollback slots: a checkpoint would decode
        them again at another."""
        if self._native.recurrent:
            self.widths = tuple(width for width in self.widths if width <= self._native.n_slots + 1)
        if not self.widths or (self.depth and self.widths == (1,)):
            raise LoadError(
                f"exact decoding needs more rollback slots than {self._native.n_slots}: raise the batch "
                f"({self._settings.batch}), or leave exact out (llama.cpp has none for some architectures)"
            )
        self._native.set_widths(list(self.widths))

    def _make_plain_context(self, pace: _native.Pacing | None) -> None:
        """Gives a recurrent target a context without rollback slots, where rounds without drafts are cheaper."""
        if self._tried_plain_context:
            return
        self._tried_plain_context = True
        if self.widths and self.widths[0] > 1:  # rows that fill a round up are taken back from slots
            if pace is not None:
                pace.plain_in_place()
            return
        started = time.perf_counter()
        try:
            context = make_target_context(
                self.model.weights, replace(self._settings, batch=1), n_ctx=self.n_ctx, depth=0, n_slots=0
            )
            self._contexts.append(context)
            self._native.set_plain_context(address(context))
            if pace is not None:
                pace.delayed(time.perf_counter() - started)
        except LoadError:  # no memory for a second context
            if pace is not None:
                pace.plain_in_place()

    @property
    def _native(self) -> Any:
        return self._natives[0] if self._natives else None

    def _check_open(self) -> None:
        if self.closed:
            raise SessionError("the session is closed")

    def _check_prompt(self, tokens: list[int]) -> None:
        self._check_open()
        if not tokens:
            raise PromptError("the prompt is empty")
        n_most = self.n_ctx + 1 - self._native.min_width  # the last token's round may be filled up
        if len(tokens) > n_most:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context holds {n_most}: shorten it or raise --ctx"
            )
        bad = next((t for t in tokens if not 0 <= t < self.model.vocab.n_tokens), None)
        if bad is not None:
            raise PromptError(f"token id {bad} is outside the vocabulary of {self.model.vocab.n_tokens}")

    def _start(self, request: _Request) -> Generation:
        with self._lock:
            self._check_taken()
            self._end_current()
            self._check_open()
            self._cancelled = False
            self._native.uncancel()
            self._owner = threading.current_thread()
            self._current = Generation(self, request)
            return self._current

    def _check_taken(self) -> None:
        """Raises while there is a text here that another thread may still go on with."""
        owner, current = self._owner, self._current
        if owner is None or current is None or current.finished or self._cancelled:
            return
        if owner is not threading.current_thread() and owner.is_alive():
            raise SessionError(
                "the session is generating in another thread: make a second session for a second text"
            )

    def _end_current(self) -> None:
        current = self._current
        if current is not None:
            current.close()
            self._current = None


def _free_session(natives: list[Any], contexts: list[Any], _weights: object = None) -> None:
    natives.clear()
    while contexts:
        free_context(contexts.pop())


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]  # also numpy's integers, but no 3.7
    except TypeError as error:
        raise PromptError(f"the prompt is neither text nor token ids: {error}") from None


@dataclass
class _Request:
    tokens: list[int]
    chooser: Chooser
    max_tokens: int
    stop: list[str]
    depth: int
    pace: _native.Pacing | None
    ignore_eos: bool
    rule: str = "match"
    preserved: Mapping[int, str] = field(default_factory=dict)


class Piece(NamedTuple):
    """An emitted token with its text.

    `text` is all characters that the token completes: empty for a control token that is not preserved, or one that ends inside a character. `origin` says
    where the token came from: "drafted" (by the drafter, and it stood), "ngram" (the same of what the look-up found), "corrected"
    (the target's own, in place of a draft that did not stand) or "plain" (the target's own; nothing was drafted there).
    """

    text: str
    token: int
    origin: str


class Generation(Iterator[str]):
    """A running text: iterate for its pieces; `text`, `tokens`, `finish_reason` and `stats` grow with it.

    `finish_reason` is None while it runs, then "stop" (end of text or a stop string), "length" (max_tokens or the
    context's end) or "cancelled". Leaving the loop early is fine: the session can be used again at once. Of a character that
    the end of a text has cut, `tokens` has the first bytes and `text` nothing. `stats` is up to date when it is asked for.
    """

    def __init__(self, session: Session, request: _Request) -> None:
        self._reason: str | None = None
        self._stats = Stats(
            kind=session.kind,
            speculation="on" if request.depth else "off",
            why=session.why if request.depth or not session.depth else "depth 0 was asked for",
            depth=request.depth,
            kernels=str(session.model.kernels),
            accept=request.rule,
            widths=session.widths,
            n_prompt=len(request.tokens),
        )
        self._session = session
        self._request = request
        self._stretch_s = 0.0  # of rounds in one native call: one round
        self._is_whole = False  # whether all native calls have worked: what the session holds is then known
        self._native = _native.Generation(
            request.chooser.native,
            request.pace,
            n_ctx=session.n_ctx,
            max_tokens=min(request.max_tokens, session.n_ctx),  # no prompt leaves room for more
            depth=request.depth,
            ignore_eog=request.ignore_eos,
            stop=request.stop,
            preserved=request.preserved,
        )
        self._counting = (
            threading.RLock()
        )  # held from reading counts until they are taken over: they never go back
        self._pieces = self._run()

    @property
    def text(self) -> str:
        """What has been shown."""
        text: str = self._native.text
        return text

    @property
    def tokens(self) -> list[int]:
        """What has been emitted, the end of text left out."""
        tokens: list[int] = self._native.tokens
        return tokens

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of each of `tokens`, where they were asked for, else empty: natural logarithms, before any sampler."""
        return self._request.chooser.logprobs[: len(self.tokens)]

    def logprobs_from(self, start: int) -> list[TokenLogprobs]:
        """`logprobs` from the `start`th token on: a stream need not copy all of them with every piece.

        Example:
            >>> generation.logprobs_from(10)                                     # doctest: +SKIP
        """
        return self._request.chooser.logprobs_from(start)[: max(0, len(self.tokens) - start)]

    @property
    def stats(self) -> Stats:
        with self._counting:
            self._stats.count(self._native.counts)
        if self._request.rule == "auto":
            self._stats.accept = "auto, now " + ("reject" if self._session._rules.rejects else "match")
        return self._stats

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        """How the text ended; None while it runs."""
        return self._reason or self._native.end

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except ValueError as error:
            raise _as_busy(error) from None

    def close(self) -> None:
        """Ends the text here. Idempotent; raises SessionError while another thread is in a round of it."""
        try:
            self._pieces.close()
        except ValueError as error:
            raise _as_busy(error) from None
        self._finish("cancelled")

    def pieces(self) -> Iterator[Piece]:
        """Iterates token by token, each with its text and where it came from; what a stop string holds back comes later.

        All texts together are `text`, all tokens `tokens`. Costs a call per round more than iterating for text alone.

        Example:
            >>> for text, token, origin in session.generate("import os\\n").pieces():    # doctest: +SKIP
            ...     print(f"{origin:10}{text!r}")
            drafted   'import'
        """
        n = 0
        for _ in itertools.chain(self, [""]):
            for piece in self._native.pieces(n):
                n += 1
                yield Piece(*piece)

    def stretch(self, seconds: float) -> None:
        """From now on every step of an iteration takes the rounds that begin within so many seconds: for a reader who wants text
        no more often than that, and would rather have it sooner. 0 is a round a step.

        Example:
            >>> generation.stretch(0.02)                                         # doctest: +SKIP
        """
        self._stretch_s = seconds

    def read(self) -> str:
        """Runs to the end and returns the whole text, in fewer calls than there are rounds."""
        self.stretch(READ_S)
        for _ in self:
            pass
        return self.text

    def _finish(self, reason: str) -> None:
        self._reason = self.finish_reason or reason
        self._request.chooser.close()

    def _run(self) -> Generator[str, None, None]:
        # This generator runs in one thread at a time, which CPython sees to, and is the session's only one that has not ended:
        # so nobody else calls the native session.
        session, request, stats = self._session, self._request, self._stats
        native, rounds, turns = session._native, self._native, session.model.turns
        try:
            opening = self._prefill()
            if opening is None:
                self._finish("cancelled")
                return
            if opening:
                yield opening
            if request.depth and not rounds.end:
                started = time.perf_counter()
                with turns:
                    self._is_whole = False
                    native.catch_up()
                    self._is_whole = True
                stats.prompt_s += time.perf_counter() - started
            clock, emit = time.perf_counter, rounds.rounds
            while True:
                started = clock()
                shown = emit(native, turns, self._stretch_s)
                while shown is None and self._give():
                    shown = emit(native, turns, self._stretch_s)
                stats.generate_s += clock() - started
                if shown is None:
                    break
                if shown:
                    yield shown
            if request.depth:
                with turns:
                    native.adopt()
            tail = rounds.finish()
            if tail:
                yield tail
        finally:
            self._finish("cancelled")
            _native.release_team()  # the next text may be another thread's
            stats.waiting = _native.waiting()
            self._remember()
            if session._current is self:  # so that the session goes with its last reference
                session._current = None

    def _give(self) -> bool:
        """What the next round wants first; False where it wants nothing, and the text has ended."""
        session, rounds = self._session, self._native
        if not rounds.wants_plain_context:
            return False
        with session.model.turns:
            session._make_plain_context(self._request.pace)
        return True

    def _remember(self) -> None:
        """After the text: what the session holds, and counts of its tokens."""
        session, rounds = self._session, self._native
        if self._is_whole and rounds.whole:
            session._history = [*self._request.tokens, *rounds.chosen]
            session._n_prompt = len(self._request.tokens)
        if session._learn:
            session.model.count(self.tokens)
        if session._draft_vocab is not None:
            counts = rounds.counts
            self._stats.coverage = counts.n_known / max(1, counts.n_chosen)

    def _prefill(self) -> str | None:
        """Feeds the prompt, what the session already holds left out; what the first token shows, or None when cancelled.

        A piece a turn, the first one ahead of texts that go on: until then nobody sees anything. Turns may be long in coming: what
        goes before the first piece and after the last one needs none of its own.
        """
        session, tokens = self._session, self._request.tokens
        native, turns, started = session._native, session.model.turns, time.perf_counter()
        opening: str | None = None
        stops: list[int] | None = None
        done = 0
        while opening is None:
            with turns.ahead if stops is None else turns:
                if stops is None:
                    done = self._stats.n_reused = session._hold(tokens)
                    native.adopt(tokens[done:])
                    stops = session._checkpoint_places(tokens, done)
                if session._cancelled:
                    session._history = tokens[:done]
                    return None
                ends = min(done + session._n_piece, *stops[:1], len(tokens))
                native.feed(tokens[done:ends], ends == len(tokens), turns)
                done = ends
                if stops and done == stops[0]:
                    native.checkpoint()
                    stops.pop(0)
                if done == len(tokens):
                    first = int(native.first(self._request.chooser.native))
                    self._stats.prompt_s = self._stats.first_s = time.perf_counter() - started
                    opening = str(self._native.begin(native, first))
        self._is_whole = True
        return opening


def close_after(resource: Session | Model, error: BaseException | None) -> None:
    """Leaves a `with` block. The error that ends it, if one does, is told, and not that a thread still generates: that thread
    is cancelled then, and what it uses goes with its last reference."""
    try:
        resource.close()
    except SessionError:
        if error is None:
            raise
        resource.cancel()


def _as_busy(error: ValueError) -> Exception:
    """CPython refuses to enter a generator that runs already, with a ValueError; here in our words."""
    if str(error) != "generator already executing":
        return error
    return SessionError("the session is generating in another thread: cancel() it and wait for its end")
