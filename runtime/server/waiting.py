"""The queue of requests: bounded, and fair to clients, who take turns. Knows nothing of what waits.

Within a client the order is that of arrival. One client alone may fill the queue; as soon as others come, it gives places up:
a full queue refuses whoever has most in it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """A queue with `n_most` places. Not locked: its owner sees to that.

    Example:
        >>> queue = Waiting[str](3)
        >>> [queue.push(*one) for one in [("a", "1"), ("a", "2"), ("a", "3"), ("b", "4")]]
        [None, None, None, '3']
        >>> [queue.pop() for _ in range(4)]
        ['1', '4', '2', None]
    """

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        self._of_client: OrderedDict[str, deque[T]] = OrderedDict()  # in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._of_client.values()))

    def push(self, client: str, item: T) -> T | None:
        """Puts an item at the end of its client's; returns what there is no place for: it or another's last, or None."""
        self._of_client.setdefault(client, deque()).append(item)
        if len(self) <= self._n_most:
            return None
        greediest = max(reversed(self._of_client), key=lambda name: len(self._of_client[name]))
        if len(self._of_client[greediest]) == len(self._of_client[client]):
            greediest = client
        out = self._of_client[greediest].pop()
        self._tidy(greediest)
        return out

    def pop(self) -> T | None:
        """The first item of the client whose turn it is, or None."""
        if not self._of_client:
            return None
        client = next(iter(self._of_client))
        item = self._of_client[client].popleft()
        self._of_client.move_to_end(client)
        self._tidy(client)
        return item

    def remove(self, client: str, item: T) -> bool:
        """Takes an item out; whether it was there."""
        items = self._of_client.get(client, ())
        if item not in items:
            return False
        self._of_client[client].remove(item)
        self._tidy(client)
        return True

    def _tidy(self, client: str) -> None:
        if not self._of_client[client]:
            del self._of_client[client]
