"""The endpoints: OpenAI's, those for adapters that vLLM has, and the page."""

import asyncio
import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from lorawgpu import __version__
from lorawgpu.errors import UserError
from lorawgpu.serve.answers import Service
from lorawgpu.serve.chat import answer_chat
from lorawgpu.serve.completions import answer_completion
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.http import Events, Gate, error_response, read_body, unless_gone
from lorawgpu.serve.limits import LOOPBACK, MAX_CONNECTIONS, MAX_HEADERS
from lorawgpu.serve.models import Served
from lorawgpu.serve.schema import ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter, parse
from lorawgpu.util.printable import message

PAGE = Path(__file__).parent / "page.html"
UVICORN = {
    "http": "h11",  # which limits headers; httptools keeps whatever is sent
    "h11_max_incomplete_event_size": MAX_HEADERS,
    "limit_concurrency": MAX_CONNECTIONS,
    "log_level": "warning",
    "lifespan": "off",
    "server_header": False,
    "timeout_graceful_shutdown": 3,  # seconds
}
CLIENT_GONE = 499  # nobody reads this answer; the access log shows it
MESSAGES = {404: "There is no such path.", 405: "This path takes another method."}


def make_app(service: Service, key: str | None = None, host: str = LOOPBACK[1], may_load: bool = True) -> Gate:
    """The ASGI application. `host`: the address that it is served on; `may_load`: whether clients load adapters."""
    endpoints = Endpoints(service, may_load)
    routes = [
        Route("/", page),
        Route("/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/load_lora_adapter", endpoints.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoints.unload, methods=["POST"]),
    ]
    handlers = {ApiError: _api_error, UserError: _user_error, HTTPException: _http_error}
    handlers |= {ClientDisconnect: _client_gone, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, key, LOOPBACK if host in LOOPBACK else None)


class Endpoints:
    def __init__(self, service: Service, may_load: bool):
        self.service, self.may_load = service, may_load

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(m) for m in self.service.models.all()]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self.service.models.find(request.path_params["name"])))

    def _model(self, served: Served) -> dict:
        base = self.service.models.base
        parent = None if served is base else base.name
        named = {"id": served.name, "object": "model", "created": served.created, "owned_by": "lorawgpu"}
        return named | {"parent": parent, "max_model_len": self.service.context}

    async def chat(self, request: Request) -> "Response | Events":
        return await self._answer(request, ChatRequest, answer_chat)

    async def completions(self, request: Request) -> "Response | Events":
        return await self._answer(request, CompletionRequest, answer_completion)

    async def _answer(self, request: Request, kind, begin) -> "Response | Events":
        asked = await asyncio.to_thread(parse, kind, await read_body(request))
        answer = await begin(self.service, asked)
        if asked.stream:
            return Events(answer.chunks(), answer.deltas.close)
        try:
            found = await unless_gone(request.receive, answer.whole())
        finally:
            answer.deltas.close()
        return Response(status_code=CLIENT_GONE) if found is None else JSONResponse(found)

    async def load(self, request: Request) -> Response:
        asked = parse(LoadAdapter, await self._body(request))
        await asyncio.to_thread(self.service.models.load, asked.lora_name, Path(asked.lora_path))
        return JSONResponse({"message": f"Success: LoRA adapter '{asked.lora_name}' added successfully."})

    async def unload(self, request: Request) -> Response:
        asked = parse(UnloadAdapter, await self._body(request))
        self.service.models.unload(asked.lora_name)
        return JSONResponse({"message": f"Success: LoRA adapter '{asked.lora_name}' removed successfully."})

    async def _body(self, request: Request) -> bytes:
        if not self.may_load:
            raise ApiError(403, "Adapters are loaded over the network only with an API key: start with --api-key.")
        return await read_body(request)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The page, and a policy that allows its own script and styles, and no network but this server."""
    html = PAGE.read_text("utf-8")

    def digest(tag: str) -> str:
        body = re.search(f"<{tag}>(.*?)</{tag}>", html, re.S)[1]
        return "'sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() + "'"

    policy = f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return html, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


async def page(request: Request) -> Response:
    html, headers = _page()
    return HTMLResponse(html, headers=headers)


async def _api_error(_: Request, error: ApiError) -> Response:
    return error_response(error)


async def _user_error(_: Request, error: UserError) -> Response:
    return error_response(ApiError(400, message(str(error))))


async def _http_error(_: Request, error: HTTPException) -> Response:
    return error_response(ApiError(error.status_code, MESSAGES.get(error.status_code, error.detail)))


async def _client_gone(_: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _bug(_: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "The server failed to answer: its log says why."))
