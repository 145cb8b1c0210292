"""Errors as OpenAI's API reports them: {"error": {"message", "type", "param", "code"}}."""


class ApiError(Exception):
    """A request that is refused: an HTTP status, a message, the parameter that is wrong, and OpenAI's code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def too_long(prompt: int, answer: int, context: int, param: str) -> ApiError:
    """For a prompt, or a prompt and its answer, that the context has no room for."""
    what = f"your prompt has {prompt:,} tokens" + (f" and {param} asks for {answer:,} more" if answer else "")
    message = f"This model's maximum context length is {context:,} tokens, but {what}."
    return ApiError(400, message, param if answer else None, "context_length_exceeded")
