"""What every endpoint needs of HTTP: who may ask, bodies within limits, errors as JSON, server-sent events."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.limits import BODY_SECONDS, MAX_BODY

OPEN = ("/", "/health")  # paths that need no key: they show nothing of the models


class Gate:
    """Refuses requests before they reach an endpoint: without the key; from other sites' pages; and on loopback those
    for another host, whose name was pointed here (DNS rebinding). `hosts`: the names that are ours, None for any."""

    def __init__(self, app: ASGIApp, key: str | None, hosts: tuple[str, ...] | None):
        self.app, self.key, self.hosts = app, key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refusal(scope)):
            await error_response(refused)(scope, receive, send)
        elif scope["type"] != "websocket":
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            return ApiError(403, "This server answers on loopback only: use localhost or 127.0.0.1.", code="wrong_host")
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return ApiError(403, "Pages of other sites may not use this server.", code="wrong_origin")
        if self.key is None or scope["path"] in OPEN:
            return None
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key.encode()):
            return None
        return ApiError(401, "Wrong or missing API key: send 'Authorization: Bearer KEY'.", code="invalid_api_key")


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def read_body(request: Request) -> bytes:
    """The body of a JSON request. ApiError for another type, one that is too large, or one that takes too long.

    The type is checked because a page of another site can send any other type without asking.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Send a JSON body, with 'Content-Type: application/json'.")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise ApiError(413, f"The body is larger than {MAX_BODY:,} bytes.", code="request_too_large")
    except TimeoutError:
        raise ApiError(408, f"The body took longer than {BODY_SECONDS:.0f} seconds.") from None
    return bytes(body)


def error_response(error: ApiError) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
    return JSONResponse(error.body(), error.status, headers.get(error.status))


async def unless_gone(receive: Receive, work: Awaitable):
    """The result of `work`, or None if the client goes away first: then the work is cancelled."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events:
    """A response of server-sent events, as OpenAI streams them. `close`: called at the end, also if the client goes
    away."""

    def __init__(self, parts: AsyncIterator[dict], close: Callable[[], None]):
        self.parts, self.close = parts, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await unless_gone(receive, self._send(send))
        except OSError:  # the client went away
            pass
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        async def event(data: str, more: bool = True) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async for part in self.parts:
                await event(json.dumps(part, ensure_ascii=False, separators=(",", ":")))
        except ApiError as error:  # the status was sent long ago
            await event(json.dumps(error.body()), more=False)
        else:
            await event("[DONE]", more=False)
