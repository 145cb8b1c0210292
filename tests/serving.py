"""A service with the byte model and two adapters, on a port of its own, and ways to ask it."""

import contextlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import uvicorn
from byte_model import CASE
from golden_case import GOLDEN

from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.serve.app import UVICORN, make_app
from lorawgpu.serve.setup import Sizes, load_adapters, open_service, share

BASE, FIRST, SECOND = "base", "first", "second"


def save_other(folder, config):
    """A PEFT folder that answers otherwise: three times the golden adapter after three optimizer steps."""
    expected = np.load(GOLDEN / "llama_dense" / "expected.npz")
    lora, _ = read_adapter(CASE / "adapter_init", config)
    tensors = {k.removeprefix("after3."): 3 * v for k, v in expected.items() if k.startswith("after3.")}
    write_adapter(folder, lora, tensors, "base")
    return folder


@contextlib.contextmanager
def served(llm, adapters, sizes=Sizes(cache=8192), key=None, host="127.0.0.1", **options):  # noqa: B008 (frozen)
    """Yields a `Site`: a service over the weights of `llm`, behind HTTP."""
    sizes = sizes.fitted(llm.device, llm.checkpoint)
    errors = []
    shared = share(llm.device, llm.checkpoint, llm.model, sizes, llm.kernels)
    service = open_service(llm.checkpoint, shared, BASE, sizes, errors.append)
    load_adapters(service, adapters)
    with listening(make_app(service, key, host, **options)) as port:
        yield Site(port, service, key)
    service.close()
    assert errors == []


@contextlib.contextmanager
def listening(app):
    """The port on which uvicorn serves an application meanwhile."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


class Site:
    def __init__(self, port, service, key=None):
        self.port, self.service, self.key = port, service, key

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, key=None):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key or "none", max_retries=0, timeout=60)

    def send(self, method, path, body=b"", headers=()):
        """(status, body) of one raw request, within a few seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path, body, **headers):
        """(status, JSON) of a JSON request; `body`: an object or bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, found = self.send("POST", path, data, {"Content-Type": "application/json", **headers})
        return status, json.loads(found)

    def idle(self, seconds=10):
        """Wait until no answer is in work."""
        scheduler, end = self.service.scheduler, time.monotonic() + seconds
        while scheduler.active or scheduler.waiting:
            assert time.monotonic() < end, "answers are still in work"
            time.sleep(0.02)
