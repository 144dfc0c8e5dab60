"""What a client did wrong, or the server cannot do now, as a status and OpenAI's error object. Knows no HTTP library."""

from __future__ import annotations

from typing import Any

from llama_sidecar.sidecars import LlamaSidecarError
from llama_sidecar.sidecars.errors import printable

MAX_MESSAGE = 1000  # characters: a value that is wrong may be as long as a body
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(LlamaSidecarError):
    """A request that is not answered.

    Args:
        message: what was found, what was expected, what to do.
        status: of HTTP.
        param: the field that is meant.
        code: OpenAI's word for it, where programs look for one.
        headers: more of the answer's.

    Example:
        >>> RequestError("no such model", status=404, code="model_not_found").body()["error"]["type"]
        'invalid_request_error'
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        # A field's name is a client's, and JSON's escapes may spell what is no text; messages are printable already.
        param = self.param and printable(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}
