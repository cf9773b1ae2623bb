"""Errors that the server sends to a client."""

from pipeline.data.records import replace_surrogates


class ServeError(Exception):
    """An error of a request, with its HTTP status.

    code: OpenAI's machine-readable code, or None. param: the field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        message, param = replace_surrogates(message), None if param is None else replace_surrogates(param)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, object]:
        """Return the JSON body of the response, in the form of OpenAI's API."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
