"""What the server counts, in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from ..stats import Stats

PREFIX = "llama_sidecar"
BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_COUNTERS = {
    "requests_total": "Requests answered, by path and status.",
    "cancelled_total": "Answers that ended early: the client went, or the server was shut down.",
    "prompt_tokens_total": "Tokens of prompts.",
    "prompt_tokens_reused_total": "Of these, how many a slot held already.",
    "tokens_total": "Tokens written.",
    "rounds_total": "Rounds: decodes of the target after the prompt.",
    "drafted_tokens_total": "Tokens drafted.",
    "accepted_tokens_total": "Of these, how many stood.",
    "prompt_seconds_total": "Seconds spent on prompts, turns of other slots included.",
    "generate_seconds_total": "Seconds spent on writing, turns of other slots included.",
}
_GAUGES = {
    "slots": "Sessions that answer.",
    "slots_busy": "Of these, how many are answering.",
    "waiting": "Requests in the queue.",
}


class Metrics:
    """Counts, for any number of threads.

    Example:
        >>> metrics = Metrics()
        >>> metrics.count_request("/v1/models", 200)
        >>> [line for line in metrics.text({"slots": 1}).splitlines() if "requests" in line][-1]
        'llama_sidecar_requests_total{path="/v1/models",status="200"} 1'
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first_s: Counter[float] = Counter()
        self._first_sum_s = 0.0

    def count_request(self, path: str, status: int) -> None:
        """A request that was answered; `path` is a route's."""
        with self._lock:
            self._requests[path, status] += 1

    def count_answer(self, stats: Stats, *, waited_s: float, cancelled: bool) -> None:
        """A text that ended, having waited for its slot."""
        with self._lock:
            self._counts["cancelled_total"] += cancelled
            self._counts["prompt_tokens_total"] += stats.n_prompt
            self._counts["prompt_tokens_reused_total"] += stats.n_reused
            self._counts["tokens_total"] += stats.n_tokens
            self._counts["rounds_total"] += stats.n_rounds
            self._counts["drafted_tokens_total"] += stats.n_drafted
            self._counts["accepted_tokens_total"] += stats.n_accepted
            self._counts["prompt_seconds_total"] += stats.prompt_s  # type: ignore[assignment]  # a float, and no less counted
            self._counts["generate_seconds_total"] += stats.generate_s  # type: ignore[assignment]
            if stats.n_tokens:
                first_s = waited_s + stats.first_s
                self._first_s[next((bound for bound in BOUNDS_S if first_s <= bound), float("inf"))] += 1
                self._first_sum_s += first_s

    def text(self, gauges: dict[str, int]) -> str:
        """All of it, for a scrape."""
        with self._lock:
            return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: dict[str, int]) -> Iterator[str]:
        for name, help in _COUNTERS.items():
            yield from _head(name, help, "counter")
            if name == "requests_total":
                for (path, status), n in sorted(self._requests.items()):
                    yield f'{PREFIX}_{name}{{path="{path}",status="{status}"}} {n}'
            else:
                yield f"{PREFIX}_{name} {self._counts[name]:.10g}"
        for name, value in gauges.items():
            yield from _head(name, _GAUGES[name], "gauge")
            yield f"{PREFIX}_{name} {value}"
        name, n = "first_token_seconds", 0
        yield from _head(name, "From a request's arrival to its first token.", "histogram")
        for bound in (*BOUNDS_S, float("inf")):
            n += self._first_s[bound]
            yield f'{PREFIX}_{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {n}'
        yield f"{PREFIX}_{name}_sum {self._first_sum_s:.10g}"
        yield f"{PREFIX}_{name}_count {n}"


def _head(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}_{name} {help}"
    yield f"# TYPE {PREFIX}_{name} {kind}"
