"""Exit codes, messages, and the options that commands share."""

import os
import subprocess
import sys
import types

import pytest

from lorawgpu import __version__, cli
from lorawgpu.cli import COMMANDS, add_device_option, add_model_options, hint, main_of, parser_of, quoted
from lorawgpu.config.schema import TrainConfig
from lorawgpu.errors import CheckFailed, DeviceError, UserError
from lorawgpu.util.suggest import nearest


def raising(error):
    def run(argv):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CheckFailed("loss differs"), 1, "error: loss differs\n"),
        (UserError("lora_r: got -1"), 2, "error: lora_r: got -1\n"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 2, "error: x.txt: No such file or directory\n"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
        (DeviceError("device lost"), 3, "error: device lost\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(capsys, error, code, text):
    assert main_of(raising(error))([]) == code
    out, err = capsys.readouterr()
    assert out == "" and err == text


def test_what_run_returns_is_the_exit_code():
    assert main_of(lambda argv: None)([]) == 0
    assert main_of(lambda argv: 1)([]) == 1
    assert main_of(lambda argv: len(argv))(["a", "b"]) == 2


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        main_of(lambda argv: 1 // 0)([])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: --data (see lorawgpu generate --help)"),
        (["--model"], "argument --model: expected one argument"),
        (["--data", "d", "--top", "3"], "unrecognized arguments: --top 3"),
        (["--dat", "d"], "the following arguments are required: --data"),  # no guessing of abbreviations
    ],
)
def test_a_wrong_command_line_is_one_message(capsys, argv, words):
    def run(argv):
        parser = parser_of("generate")
        add_model_options(parser)
        parser.add_argument("--data", required=True)
        parser.parse_args(argv)

    assert main_of(run)(argv) == 2
    out, err = capsys.readouterr()
    assert words in err and err.startswith("error: ") and err.count("\n") == 1 and out == ""


def test_shared_options():
    parser = parser_of("generate")
    add_model_options(parser)
    add_device_option(parser)
    args = parser.parse_args(["--model", "m"])
    assert (args.model, args.adapter, args.device) == ("m", None, None)
    args = parser.parse_args(["--model", "m", "--adapter", "a", "--device", "cpu"])
    assert (args.adapter, args.device) == ("a", "cpu")


def test_the_listing_and_the_version(capsys):
    for argv in ([], ["--help"], ["help"]):
        assert cli.main(argv) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in COMMANDS)
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"lorawgpu {__version__}\n"


def test_help_for_a_command(capsys):
    for argv in (["help", "report"], ["report", "--help"]):
        with pytest.raises(SystemExit) as end:
            cli.main(argv)
        assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: lorawgpu report ")
    assert cli.main(["help", "reprot"]) == 2 and "the nearest one is 'report'" in capsys.readouterr().err


def test_the_next_command_is_named_on_a_terminal_only(capsys, monkeypatch):
    hint("lorawgpu report out")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    hint("lorawgpu report out")
    assert capsys.readouterr() == ("", "next: lorawgpu report out\n")
    assert quoted("report", "C:\\my runs\\out", "a/b-c.yaml") == 'report "C:\\my runs\\out" a/b-c.yaml'


def test_an_unknown_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'trian'; the nearest one is 'train'")
    assert cli.main(["quantize"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'quantize' (lorawgpu --help lists all)\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("lerning_rate", "learning_rate"),
        ("lora_rank", "lora_r"),
        ("alpha", "lora_alpha"),
        ("Lora_R", "lora_r"),
        ("LEARNING_RATE", "learning_rate"),
        ("warmup", "warmup_steps"),
        ("optimizer", None),  # `adapter` is the closest, but far
        ("gradient_clipping", None),  # not gradient_checkpointing
        ("foo", None),
        ("", None),
    ],
)
def test_only_close_words_are_suggested(word, meant):
    assert nearest(word, TrainConfig.model_fields) == meant


def test_a_command_is_called_with_the_rest(monkeypatch):
    module = types.ModuleType("lorawgpu.doctor.__main__")
    module.main = lambda argv: 5 if argv == ["--json"] else 0
    monkeypatch.setitem(sys.modules, "lorawgpu.doctor.__main__", module)
    assert cli.main(["doctor", "--json"]) == 5


def test_a_closed_pipe_is_not_an_error():
    code = (
        "import sys\nfrom lorawgpu.cli import main_of\n"
        "def run(argv):\n    while True:\n        print('x' * 1000, flush=True)\nsys.exit(main_of(run)([]))"
    )
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("encoding", "out"), [("ascii", b"a?"), ("cp1252", b"a?"), ("utf-8", "a\u2192".encode()), ("ascii:ignore", b"a")]
)
def test_text_that_a_pipe_cannot_encode(encoding, out):
    code = "import sys\nfrom lorawgpu.cli import main_of\nsys.exit(main_of(lambda argv: print('a\u2192', end=''))([]))"
    env = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, b"")


def test_an_export_says_how_to_run_it(tmp_path):
    from lorawgpu.export import gguf, gguf_merged, merged, mlx, peft
    from lorawgpu.export.__main__ import command_for

    source, out, file = types.SimpleNamespace(base_name="org/base"), tmp_path / "out", tmp_path / "out" / "a.gguf"
    expected = {
        gguf: f"llama-cli -m BASE.gguf --lora {file}",
        gguf_merged: f"llama-cli -m {file}",
        mlx: f"mlx_lm.generate --model org/base --adapter-path {out} --prompt ...",
        merged: f"lorawgpu generate --model {out} --prompt ...",
        peft: f"lorawgpu generate --adapter {out} --compare --prompt ...",
    }
    for form, command in expected.items():
        assert command_for(form, out, {"a": file}, source) == command
