"""The user's class: load a main file with its sidecar, generate, chat.

A `Model` holds weights and is shared by any number of sessions, in any threads; a session holds one sequence.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from llama_sidecar.sidecars import LlamaSidecarError, MainFile, Sidecar, hub, open_main, read_model
from llama_sidecar.sidecars.compact import Compact, open_compact
from llama_sidecar.sidecars.cut_output import CutOutput, open_cut
from llama_sidecar.sidecars.memory import AUTO_DEPTH, DEFAULT_CHECKPOINTS, Contents, layer_cache_bytes

from . import heads, kernel_choice, memory, placement, session_file
from ._native import DraftVocab, Turns
from .costs import costs_for
from .draft_vocab import make_draft_vocab
from .drafter_choice import AUTO, NGRAM, Choice, File, choose_drafter
from .errors import CacheError, HeadsUnavailable, LoadError, SessionError
from .exactness import exactness_for, remembered
from .library import set_verbose
from .pace import Pace, for_slots_that_pay
from .sampling import file_defaults
from .session import Generation, Scripted, Session, close_after
from .vocab import Vocab
from .weights import MAX_DEPTH, Settings, Weights, make_draft_context, repacks

NGRAM_DEPTH = 7  # the same of the look-up alone: where it is right at all it is often right for long


def load(
    main: str | os.PathLike[str],
    sidecar: str | os.PathLike[str] | None = None,
    *,
    spec_type: str = "auto",
    depth: int | str = AUTO,
    gpu_layers: int | str = "auto",
    device: str | None = None,
    threads: int | None = None,
    ctx: int | str | None = None,
    batch: int = 512,
    flash_attn: str = "auto",
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    kernels: str = kernel_choice.DEFAULT,
    draft_vocab: int | str = "auto",
    min_confidence: float = 0.0,
    ngram: bool = True,
    learn: bool = False,
    exact: bool = False,
    use_mmap: bool = True,
    use_mlock: bool = False,
    memory_check: bool = True,
    checkpoints: int = DEFAULT_CHECKPOINTS,
    force: bool = False,
    verbose: bool = False,
) -> Model:
    """Loads a main GGUF and, where one is found, its sidecar.

    Args:
        main: the main file (the first shard of a sharded one), or `hf://ORG/NAME[:TYPE]` on the Hugging Face Hub, whose sidecar is
            fetched with it.
        sidecar: the sidecar, or a compact one, which is used as it is, or a smaller model of the same vocabulary that is to
            draft, here or on the Hub; by default the sidecar beside the main file, or the head inside it.
        spec_type: "auto", "none", or a kind ("mtp", "draft-mtp", "model", ...), which must then be there.
        depth: tokens drafted per round, 1 to 64; "auto" lets pace choose it round by round from what drafts cost here and
            how many stand, 0 included, so that it is never slower than plain decoding. The first session then measures the
            costs, at most 5 seconds, and they are kept in the user's cache folder.
        gpu_layers: layers on a GPU; "auto" takes as many as fit its free memory.
        device: llama.cpp's device names, comma separated, or "none".
        threads: CPU threads (default: the physical cores).
        ctx: context length in tokens (default: the smaller of the model's own and 8,192); "auto" is the largest that fits the memory
            that is left, at most the model's own.
        batch: prompt tokens per decode.
        flash_attn: "auto", "on" or "off"; "auto" is "off" where our kernels compute all products, whose rows are then equal at any length.
        cache_type_k, cache_type_v: the KV cache's types ("f16", "q8_0", ...).
        kernels: what computes products of up to 8 rows on the CPU: "stock" is llama.cpp's own; "ours" has rows that are equal
            to the bit at every width; "auto" takes for each type what is faster here, measured once in about a second.
        draft_vocab: rows of the head's vocabulary to draft with, cut from it once and kept in the user's cache folder;
            "auto" cuts large vocabularies to 32,768, "full" cuts none. Of an MTP head's an eighth are spare, for tokens that turn up.
        min_confidence: of a DSpark sidecar with a confidence head: a token that is less likely to stand ends its draft (0 to 1).
        ngram: where pace chooses the depth, also verify what followed the last time the text ended as it does now, whenever that
            is faster than drafting ("prompt look-up"); spec_type "ngram" does nothing else.
        learn: count the tokens this model writes (never its text) in the user's cache folder, and draft with those it
            writes most.
        exact: decode only as many rows at once as have logits that are equal to the bit here, plain rounds too, so that token
            ids are those of plain decoding by construction. Which these are is measured once, in a few seconds, and kept in
            the user's cache folder; where none agree it is refused.
        use_mmap: map the files, so that processes share them and what is not needed leaves the memory; else read them into memory
            of this process, which Linux then gives in pages of 2 MB: faster where it maps files by 4 KB, as most file systems do.
        use_mlock: keep the weights from being swapped out, if the system lets it.
        memory_check: refuse what this machine's memory is too small for, with what would fit.
        checkpoints: how many states of a recurrent or hybrid model a session keeps, each where a message ends: the next prompt goes
            on from the last one before which it says the same. Each takes the memory of one recurrent state. Models with
            attention alone need none.
        force: use a sidecar although its fingerprint says that it belongs to another model.
        verbose: let llama.cpp's own log through to stderr.

    Raises:
        LlamaSidecarError: a file is missing, broken or not what it is given as; the two do not belong together; the
            kind asked for is not there; the memory is too small; llama.cpp lacks what is needed or refuses the file.

    Example:
        >>> with load("demo-Q8_0.gguf") as model:                              # doctest: +SKIP
        ...     print(model.generate("def main():", max_tokens=32).read())
    """
    if depth != AUTO and not (isinstance(depth, int) and 1 <= depth <= MAX_DEPTH):
        raise LoadError(
            f"depth {depth!r} is neither 'auto' nor between 1 and {MAX_DEPTH} (spec_type='none' turns drafting off)"
        )
    if not (isinstance(checkpoints, int) and checkpoints >= 0):
        raise LoadError(f"checkpoints {checkpoints!r}: a whole number is wanted, 0 for none")
    settings = Settings(
        gpu_layers=gpu_layers,
        device=device,
        threads=threads,
        ctx=None if ctx == AUTO else ctx,  # type: ignore[arg-type]  # another word is refused there
        batch=batch,
        flash_attn=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        kernels=kernels,
        use_mmap=use_mmap,
        use_mlock=use_mlock,
    )
    main_file = open_main(hub.fetch(main, spec_type if sidecar is None else "none"))
    if sidecar is not None:
        sidecar = hub.fetch_sidecar(sidecar, spec_type)
    chosen = choose_drafter(main_file, sidecar, spec_type, force)
    if not (draft_vocab in ("auto", "full") or (isinstance(draft_vocab, int) and draft_vocab > 0)):
        raise LoadError(f"draft vocabulary {draft_vocab!r} is neither 'auto', 'full' nor a number of rows")
    if isinstance(draft_vocab, int) and not chosen.can_be_cut:
        raise LoadError(
            f"draft vocabulary {draft_vocab}: what drafts here is of kind {chosen.speculation.kind} and has no output of all "
            f"tokens that could be cut to fewer rows: leave it out"
        )
    if isinstance(chosen.file, Compact) and draft_vocab != "auto":
        raise LoadError(
            f"{chosen.file.path} is a compact sidecar and is used with the {len(chosen.file.tokens):,} rows it has: "
            f"leave the draft vocabulary ({draft_vocab!r}) out, or give the sidecar that it was cut from"
        )
    _check_confidence(min_confidence, chosen, main_file)
    if chosen.speculation.kind == NGRAM and not ngram:
        raise LoadError(f"spec_type {spec_type!r} and no n-grams (--no-ngram) contradict each other")
    set_verbose(verbose)
    return Model(
        main_file,
        chosen,
        settings,
        depth,
        draft_vocab=draft_vocab,
        min_confidence=min_confidence,
        ngram=ngram,
        learn=learn,
        exact=exact,
        ctx_fits=ctx == AUTO,
        memory_check=memory_check,
        checkpoints=checkpoints,
    )


def _check_confidence(least: float, chosen: Choice, main: MainFile) -> None:
    if not (isinstance(least, (int, float)) and 0 <= least <= 1):
        raise LoadError(f"min_confidence {least!r} is not between 0 and 1")
    if least and not chosen.has_confidence(main):
        raise LoadError(
            f"{(chosen.file or main).path} has no confidence head, which min_confidence {least} is for: leave it out"
        )


_models: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _free_at_exit() -> None:
    """Frees what nobody closed: some backends insist. The turns are taken for good, so that no daemon thread computes on."""
    for model in list(_models):
        model.turns.__enter__()
        for session in list(model._sessions):
            session._free()
        model.head_weights._free()
        model.weights._free()


class Model:
    """Loaded weights, immutable and shareable; made by `load()`. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        main: MainFile,
        chosen: Choice,
        settings: Settings,
        depth: int | str,
        *,
        draft_vocab: int | str,
        min_confidence: float,
        ngram: bool,
        learn: bool,
        exact: bool = False,
        ctx_fits: bool = False,
        memory_check: bool = True,
        checkpoints: int = DEFAULT_CHECKPOINTS,
    ) -> None:
        self.main = main
        self.checkpoints = checkpoints
        self.min_confidence = min_confidence
        self.ngram = ngram
        self.speculation = chosen.speculation
        self.drafter = chosen.drafter
        self.settings = settings
        sidecar, self._chosen = chosen.file, chosen
        self.paced = depth == AUTO
        self.max_depth = self._max_depth(chosen)
        auto_depth = AUTO_DEPTH if chosen.has_weights else NGRAM_DEPTH
        self.depth = min(self.max_depth, auto_depth if isinstance(depth, str) else depth)
        self.n_ctx = settings.ctx or placement.default_ctx(main.header.keys, main.header.arch)
        self.sampling = file_defaults(main.header.keys)
        self.turns = Turns(settings.n_threads)
        self._lock = threading.RLock()  # no session is made while it is closed
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._default: Session | None = None
        self.gpu_layers = self._place(sidecar, self.n_ctx)
        self.draft_vocab: DraftVocab | None = None
        self.draft_vocab_why = "all of it is drafted with"
        counts = heads.counts_for(main) if learn and self.kind else None
        compact_head = self._compact_head(sidecar, draft_vocab, counts)
        self.n_draft_vocab = len(compact_head.target_ids) if compact_head else None  # None: all of it
        head = compact_head.path if compact_head else sidecar.path if sidecar else None
        # A head that has all tokens has nothing to learn, and one that was given is not cut anew.
        self.learns = learn and compact_head is not None and compact_head is not sidecar
        embedded = self.speculation.path == main.path and head is None
        self.kernels = kernel_choice.choose(
            settings.kernels,
            [main.header, *([read_model(head)] if head else [])],
            max_rows=self.depth + 1,
            threads=settings.n_threads,
            gpu_layers=self.gpu_layers,
            repacked=repacks(),
        )
        self._memory_check = memory_check
        self.memory_plan = self._memory_plan(sidecar, head, embedded)
        if ctx_fits:
            self.n_ctx = memory.auto_ctx(
                self.memory_plan, on_gpu=lambda n_ctx: self._place(sidecar, n_ctx) >= self.gpu_layers
            )
        if memory_check:
            memory.check(main.path.name, self.memory_plan, self.n_ctx)
        self._chooses_flash_attn = settings.flash_attn.lower() == "auto"
        self.settings = replace(settings, flash_attn=self._flash_attn(self.n_ctx))
        self.weights = Weights(
            main.path,
            with_head=embedded,
            n_gpu_layers=self.gpu_layers,
            device=settings.device,
            ours=self.kernels.ours,
            use_mmap=settings.use_mmap,
            use_mlock=settings.use_mlock,
        )
        # Whether a drafter's best tokens are taken on its device. Off: llama.cpp's greedy sampler hands out the logits beside the token
        # (llm_graph_context::build_sampling), so that nothing is saved. gpu_check.py measures both.
        self.picks_on_backend = False
        self.head_weights = self.weights
        if head is not None:
            # The drafter goes where the output goes.
            on_gpu = self.gpu_layers != 0
            device = (placement.output_device(settings.device) if on_gpu else None) or settings.device
            self.head_weights = Weights(
                head,
                with_head=chosen.is_head,
                n_gpu_layers=placement.ALL_LAYERS if on_gpu else 0,
                device=device,
                ours=self.kernels.ours,
                use_mmap=settings.use_mmap,
                use_mlock=settings.use_mlock,
                writable=isinstance(compact_head, Compact),
            )
        if isinstance(compact_head, Compact):
            source = sidecar if isinstance(sidecar, Sidecar) else main
            self.draft_vocab = make_draft_vocab(source, compact_head, self.head_weights, counts)
        self.vocab = Vocab(self.weights)
        self._closed = False
        _models.add(self)
        self.exact = exact
        self.exactness = remembered(self)  # None where it has not been measured
        if exact:
            self.exactness = exactness_for(self)
            widths = self.widths(self.n_ctx)
            self.max_depth = min(self.max_depth, widths[-1] - 1)
            self.depth = min(self.depth, self.max_depth)

    def widths(self, n_ctx: int) -> tuple[int, ...]:
        """How many rows decodes may have in a context of `n_ctx` cells, ascending; empty where any number may be (not exact).

        Raises:
            LoadError: exact decoding was asked for and no two numbers of rows agree to the bit.
        """
        if not self.exact:
            return ()
        assert self.exactness is not None
        found = self.exactness.widths(n_ctx)
        most = min(self.settings.batch, n_ctx)
        widths = tuple(w for w in found if w <= most)
        if not widths or widths == (1,):
            why = f"no numbers of rows agree to the bit ({self.exactness}): --kernels ours or --flash-attn off may help"
            if found:
                why = (
                    f"those numbers of rows that agree to the bit ({self.exactness}) do not fit a decode of at most {most}: "
                    f"raise {'--batch' if self.settings.batch < n_ctx else '--ctx'}"
                )
            raise LoadError(f"exact decoding cannot be had: {why}, or leave --exact out")
        return widths

    def make_draft_context(self, settings: Settings, *, n_ctx: int, target: Any) -> Any:
        """The context of a drafter beside this target's, which must outlive it; None for one that computes nothing."""
        if not self._chosen.has_weights:
            return None
        try:
            return make_draft_context(
                self.head_weights,
                settings,
                n_ctx=n_ctx,
                is_head=self._chosen.is_head,
                other=target if self._chosen.shares_target else None,
            )
        except LoadError as error:
            raise LoadError(f"{self.head_weights.path} cannot draft for {self.main.path}: {error}") from error

    @property
    def drafts_in_one_pass(self) -> bool:
        """Whether all drafts of a round come of one decode of the drafter."""
        return self._chosen.in_one_pass

    @property
    def kind(self) -> str | None:
        """The drafter's kind, or None."""
        return self.speculation.kind

    def session(
        self,
        *,
        ctx: int | None = None,
        spec_type: str | None = None,
        depth: int | None = None,
        learn: bool | None = None,
        n_slots: int | None = None,
        restore: str | os.PathLike[str] | None = None,
        scripted: Scripted | None = None,
    ) -> Session:
        """Makes a session: its own context, drafter and sampler over these weights.

        Args:
            ctx: context length in tokens (default: the model's setting).
            spec_type: "none" makes a plain session.
            depth: drafts in every round; 0 makes a plain session (default: the model's setting, which may be pace's choice; of a
                small recurrent model `Session.depth`, the most it chooses, may be less than the model's: see `for_slots_that_pay`).
            learn: count what this session writes (default: the model's setting).
            n_slots: rollback slots for recurrent layers (default: `depth`); with fewer a checkpoint stands in.
            restore: a file that `Session.save` wrote, to go on from; of the same model, llama.cpp, KV types and context size, and
                where the model is exact, of a model that was exact with the same settings. Where another head drafts, or none
                did, drafting begins anew behind the text, and where none drafts what a drafter has seen is left out; another
                depth is fine. Flash attention is as it was, unless the model was loaded with a setting of its own.
            scripted: tests only: a drafter that knows the text.

        Raises:
            LoadError: an option out of range, or llama.cpp cannot make the context.
            SessionFileError: the file cannot be used; the text says why.
            SessionError: the model is closed.

        Example:
            >>> with load("demo-Q8_0.gguf") as model, model.session(ctx=1024) as session:   # doctest: +SKIP
            ...     print(session.generate("import os\\n", max_tokens=8).read())
        """
        if spec_type not in (None, "none", "auto"):
            raise LoadError(
                f"spec_type {spec_type!r} of a session is neither 'none' nor 'auto': the model's is {self.kind}"
            )
        wanted = self.depth if depth is None else depth
        if not 0 <= wanted <= MAX_DEPTH:
            raise LoadError(f"depth {wanted} is not between 0 and {MAX_DEPTH}")
        if scripted is None:
            wanted = min(wanted, self.max_depth)
        if n_slots is not None and n_slots < 0:
            raise LoadError(f"{n_slots} rollback slots: it cannot be negative")
        settings = self.settings if ctx is None else replace(self.settings, ctx=ctx)
        n_ctx = settings.ctx or self.n_ctx
        why = self.speculation.why
        if spec_type == "none":
            wanted, why = 0, "it was turned off for this session"
        elif self.kind is None and scripted is None:
            wanted = 0
        elif wanted == 0:
            why = "depth 0 was asked for"
        saved = None
        if restore is not None:
            saved = session_file.read(restore, session_file.Origin.of(self, n_ctx))
            if self._chooses_flash_attn:  # how values lie in the cache follows it
                settings = replace(settings, flash_attn=saved.origin.flash_attn)
        with self._lock:
            if self._closed:
                raise SessionError("the model is closed")
            pace = None
            if self.paced and depth is None and scripted is None and wanted:
                costs = costs_for(self)
                drafts = self._chosen.has_weights
                if self.memory_plan.main.is_recurrent and n_slots is None and not self.exact:
                    costs = for_slots_that_pay(costs, drafts=drafts, looks_up=self.ngram)
                pace = Pace(costs, has_drafter=drafts)
                wanted = pace.max_depth
            if self._memory_check:
                plan = self.memory_plan if wanted else self.memory_plan.plain()
                flash_attn = settings.flash_attn != "off"
                plan = replace(
                    plan, depth=wanted, paced=pace is not None, flash_attn=lambda n_ctx: flash_attn
                )
                memory.check_session(plan.at(n_ctx))
            session = Session(
                self,
                settings=settings,
                n_ctx=n_ctx,
                depth=wanted,
                why=why,
                pace=pace,
                learn=self.learns if learn is None else learn,
                n_slots=n_slots,
                n_checkpoints=self.checkpoints,
                scripted=scripted,
            )
            self._sessions.add(session)
        if restore is not None and saved is not None:
            try:
                session._restore(restore, saved)
            except BaseException:
                session.close()
                raise
        return session

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Completes `prompt` on the model's own session; options as in `Session.generate`."""
        return self._own_session().generate(prompt, **options)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Answers a conversation on the model's own session; options as in `Session.generate`."""
        return self._own_session().chat(messages, **options)

    def cancel(self) -> None:
        """Ends the running generation of every session after its current round or piece of prompt. From any thread."""
        for session in list(self._sessions):
            session.cancel()

    def close(self) -> None:
        """Closes every session and frees the weights. Idempotent."""
        with self._lock:
            for session in list(self._sessions):
                session.close()
            self._closed = True
            self.head_weights.close()
            self.weights.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self, error)

    def _own_session(self) -> Session:
        if self._default is None or self._default.closed:
            self._default = self.session()
        return self._default

    def _compact_head(
        self, sidecar: File | None, n_rows: int | str, counts: heads.Counts | None
    ) -> Compact | CutOutput | None:
        """The compact head to draft with, where one is given or can be had; `draft_vocab_why` says why not."""
        if isinstance(sidecar, Compact):
            return sidecar
        if n_rows == "full" or self.kind is None:
            return None
        if not self._chosen.can_be_cut:
            self.draft_vocab_why = f"nothing of this drafter of kind {self.kind} can be cut"
            return None
        try:
            n_kept = None if n_rows == "auto" else int(n_rows)
            source = sidecar if isinstance(sidecar, Sidecar) else self.main
            head: Compact | CutOutput
            if self._chosen.is_head:
                head = open_compact(heads.compact_head(source, n_rows=n_kept, counts=counts))
            else:
                assert isinstance(source, Sidecar)
                head = open_cut(heads.cut_drafter(source, self.main, n_rows=n_kept, counts=counts))
            if int(head.target_ids[-1]) >= len(self.main.tokens):
                raise HeadsUnavailable("its rows reach into the padding of the sidecar's vocabulary")
            return head
        except LlamaSidecarError as error:  # none can be had, or another process has removed it by now
            self.draft_vocab_why = str(error)
            return None

    def _max_depth(self, chosen: Choice) -> int:
        """The most tokens that what drafts here can draft in a round; 0 where nothing does."""
        if self.kind is None:
            return 0
        limit = chosen.max_depth(self.main)
        return MAX_DEPTH if limit is None else min(limit, MAX_DEPTH)

    def count(self, tokens: Sequence[int]) -> None:
        """Counts tokens that this model wrote, in the user's cache folder."""
        with contextlib.suppress(CacheError):  # counting is a service, not a duty
            heads.add_counts(self.main, tokens)

    def _flash_attn(self, n_ctx: int) -> str:
        return kernel_choice.flash_attention(
            self.settings.flash_attn,
            self.kernels,
            self.main.header,
            n_ctx=n_ctx,
            batch=self.settings.batch,
            cache_type_v=self.settings.cache_type_v,
        )

    def _memory_plan(self, sidecar: File | None, head: Path | None, embedded: bool) -> memory.Plan:
        return memory.Plan(
            main=Contents.of(self.main.header),
            head=Contents.of(read_model(head)) if head else None,
            embedded=embedded,
            is_head=self._chosen.is_head,
            borrows=self._chosen.shares_target,
            depth=self.depth,
            paced=self.paced and self.depth > 0,
            batch=self.settings.batch,
            cache_bits=self._cache_bits,
            flash_attn=lambda n_ctx: self._flash_attn(n_ctx) != "off",
            n_gpu_layers=self.gpu_layers,
            n_checkpoints=self.checkpoints,
        )

    @property
    def _cache_bits(self) -> float:
        """Of a key or value, the mean of both."""
        types = (self.settings.cache_type_k, self.settings.cache_type_v)
        return sum(placement.CACHE_BITS[type.lower()] for type in types) / 2

    def _place(self, sidecar: File | None, n_ctx: int) -> int:
        """How many layers go to a GPU with a context of `n_ctx` tokens."""
        if self.settings.gpu_layers != "auto":
            return int(self.settings.gpu_layers)
        devices = placement.gpus()
        if not devices or self.settings.device == "none":
            return 0
        names = [d.name for d in devices]
        if self.settings.device:
            names = [name.strip() for name in self.settings.device.split(",")]
        drafter_bytes = 0
        if sidecar is not None:
            head = sidecar.header
            cells = layer_cache_bytes(
                head.arch, head.keys, head.tensors, n_ctx=n_ctx, cache_bits=self._cache_bits
            )
            drafter_bytes = sum(t.n_bytes for t in head.tensors.values()) + sum(cells)
        return placement.n_gpu_layers(
            self.main.header,
            free_bytes=sum(d.free_bytes for d in devices if d.name in names),
            n_ctx=n_ctx,
            cache_bits=self._cache_bits,
            n_slots=self.depth,
            drafter_bytes=drafter_bytes,
        )
