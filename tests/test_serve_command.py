"""`lorawgpu serve` as a process: what it prints, how it ends, what it refuses before it loads anything."""

import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import openai
import pytest
from byte_model import CASE

from lorawgpu.errors import UserError
from lorawgpu.serve import __main__ as command
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.setup import Sizes, load_adapters


def start(*argv):
    run = [sys.executable, "-m", "lorawgpu.serve", "--port", "0", *map(str, argv)]
    return subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_it_serves_until_ctrl_c(llm_folder, llm):
    adapter = f"mine={CASE / 'adapter_init'}"
    with start(
        "--model", llm_folder, "--adapter", adapter, "--name", "tiny", "--api-key", "k", "--context", 100
    ) as server:
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        assert [m.id for m in client.models.list()] == ["tiny", "mine"]
        answer = client.completions.create(model="mine", prompt="hello", max_tokens=6, temperature=0)
        assert answer.choices[0].text == llm.generate("hello", raw=True, max_new_tokens=6)
        stream = client.completions.create(model="mine", prompt="hello", max_tokens=80, stream=True)
        next(stream)
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
    assert server.returncode == 130 and out == "" and "Traceback" not in err
    assert "serving tiny, mine\n" in err


def test_sizes_fit_the_model_and_the_cache(llm):
    checkpoint = SimpleNamespace(config=llm.config)
    fitted = Sizes().fitted(llm.device, checkpoint)
    assert fitted.context == 160 and fitted.cache == 16384
    assert Sizes(cache=200).fitted(llm.device, checkpoint).cache == 256  # whole spans
    with pytest.raises(UserError, match="--context 161: the model's context is 160"):
        Sizes(context=161).fitted(llm.device, checkpoint)
    with pytest.raises(UserError, match="the cache has room for 128 tokens"):
        Sizes(context=160, cache=128).fitted(llm.device, checkpoint)


def test_an_adapter_that_cannot_be_loaded_is_named():
    def load(name, path):
        raise ApiError(400, "The name 'a' is taken")

    service = SimpleNamespace(models=SimpleNamespace(load=load))
    with pytest.raises(UserError, match="--adapter a=x: The name 'a' is taken"):
        load_adapters(service, {"a": "x"})


def test_a_missing_library_and_a_taken_port(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match=r"cannot listen on 127.0.0.1, port \d+: .*; try --port 0"):
            command.listen("127.0.0.1", taken.getsockname()[1])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert command.main(["--model", "x"]) == 2
    assert "pip install starlette uvicorn" in capsys.readouterr().err
