"""What the documents and configs tell a reader to type works: commands parse, configs load, links resolve."""

import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from pathlib import Path

import pytest
from tiny_run import shared_main

import lorawgpu
from lorawgpu import cli
from lorawgpu.api import model as api
from lorawgpu.cli import COMMANDS
from lorawgpu.config.load import load_config
from lorawgpu.data.formats import FORMATS, detect_type, to_example
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter, write_adapter
from lorawgpu.weights.loader import open_checkpoint

ROOT = Path(__file__).parent.parent
DOCUMENTS = {
    path: path.read_text("utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/*.md")]
}
README = DOCUMENTS[ROOT / "README.md"]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
PLACEHOLDERS = {"CONFIG.yaml": "configs/tiny.yaml", "RUN_DIR": "out/tiny", "CASE_DIR...": "tests/golden/llama_dense"}


def typed() -> list[str]:
    """Every command line: in `bash` blocks and backticks of the documents, and in the headers of configs."""
    lines = []
    for text in DOCUMENTS.values():
        blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
        lines += [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`((?:lorawgpu|python|bash) [^`]+)`", text)
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    for config in (ROOT / "configs").glob("*.yaml"):
        header = re.sub(r"\\\n# *", " ", config.read_text("utf-8"))
        lines += re.findall(r"^#.*?((?:python -m lorawgpu\.|python scripts/).*)$", header, re.M)
    return sorted({part for line in lines for part in line.split(" && ") if part})


def arguments(line: str) -> list[str]:
    """A shell's words: the first of alternatives in a table (`a\\|b`), an example for a placeholder."""
    return [PLACEHOLDERS.get(word, word.partition("|")[0]) for word in shlex.split(line.replace("\\|", "|"))]


def command_of(line: str) -> tuple[str, list[str]]:
    """(command of lorawgpu, its arguments)"""
    words = arguments(line.replace("python -m lorawgpu ", "lorawgpu "))
    return (words[1], words[2:]) if words[0] == "lorawgpu" else (words[2].removeprefix("lorawgpu."), words[3:])


STAND_INS = {"base_model": "a/b", "datasets": "[{path: a/b}]", "test_datasets": "[{path: a/b}]"}  # not here, or not yet
WRITTEN = ("chats.yaml",)  # by `init`, in the line before
OURS = [line for line in typed() if re.match(r"lorawgpu (?!help)|python -m lorawgpu[. ]", line)]
SCRIPTS = [line for line in typed() if re.match(r"(python|bash) scripts/", line)]


def test_lines_were_found():
    assert len(OURS) > 10 and len(SCRIPTS) > 2 and any("--prompt" in line for line in OURS)


class Parsed(Exception):
    """The command would begin now."""


@pytest.mark.parametrize("line", OURS)
def test_a_command_line_parses(line, monkeypatch):
    def parse(parser, argv):
        ArgumentParser.parse_args(parser, argv)
        raise Parsed

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli.Parser, "parse_args", parse)
    command, argv = command_of(line)
    assert "\\n" not in line or "$'" in line, "to a shell this is a backslash and an n"
    with pytest.raises(Parsed):
        importlib.import_module(f"lorawgpu.{command}.__main__").run(argv)
    for config in [word for word in argv if word.endswith(".yaml") and word not in WRITTEN]:
        keys = [f"{key}={value}" for key, value in STAND_INS.items() if f"\n{key}:" in Path(config).read_text("utf-8")]
        overrides = [value for option, value in zip(argv, argv[1:], strict=False) if option == "--set"]
        load_config(config, keys + overrides)


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_script_is_there_and_knows_its_options(line):
    words = arguments(line)
    text = (ROOT / words[1]).read_text("utf-8")
    for option in [word for word in words if word.startswith("--")]:
        assert f'"{option}"' in text or f"{option})" in text, option


def test_the_shortest_config_is_one(tmp_path):
    (text,) = [text for kind, text in BLOCKS if kind == "yaml"]
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    (tmp_path / "chats.jsonl").write_text("", "utf-8")
    assert load_config(tmp_path / "mine.yaml").output_dir.endswith("mine")


def test_the_python_examples_run(tmp_path, monkeypatch, capsys, device, kernels):
    """With an adapter where the tiny config would have put it; fewer tokens and steps, on the device of the tests."""
    code, training = [text for kind, text in BLOCKS if kind == "python"]
    base = open_checkpoint("builtin:tiny-bitnet")
    lora = LoraConfig(4, 8, ("q_proj",))
    write_adapter(tmp_path / "out" / "tiny", lora, init_adapter(lora, base.config, 0), base.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "open_device", lambda choice: device)
    monkeypatch.setattr(api, "whole_number", lambda name, value: min(value, 4))
    exec(code, {})
    out = capsys.readouterr().out
    assert re.search(r"\n\[.+, .+\]\n", out) and re.search(r"\d\.\d+\n\(\d+, \d+\)\n$", out), out
    shared_main(monkeypatch, device, kernels)
    exec(training.replace('"max_steps": 20', '"max_steps": 1'), {})
    assert (tmp_path / "out" / "sums" / "adapter_config.json").is_file()


def test_the_records_of_the_table_are_what_it_says():
    """Every type has its row, and the record of the row is read as that type."""
    rows = re.findall(r"^\| `(\w+)` \| `(\{.*?\})`", DOCUMENTS[ROOT / "docs/DATA.md"], re.M)
    assert [kind for kind, _ in rows] == list(FORMATS)
    for kind, record in rows:
        assert detect_type(json.loads(record), ("DATA.md", 1)) == kind
        to_example(kind, json.loads(record), ("DATA.md", 1))


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "lorawgpu", "--version"], capture_output=True, text=True)
    assert done.stdout == f"lorawgpu {lorawgpu.__version__}\n" and done.returncode == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", DOCUMENTS[document])
    for target in [target for target in targets if not target.startswith("https://")]:
        assert (document.parent / target).exists(), target


def test_extras_exist_and_are_installed_from_the_clone():
    """The package is on no index, so `pip install lorawgpu` would fetch nothing or something else."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    configs = [path.read_text("utf-8") for path in (ROOT / "configs").glob("*.yaml")]
    texts = "".join([*DOCUMENTS.values(), *configs])
    assert not re.search(r"pip install ['\"]?lorawgpu", texts)
    extras = {name for names in re.findall(r'pip install -e "\.\[([\w,]+)\]"', texts) for name in names.split(",")}
    assert {"hub", "report", "dev"} <= extras
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras), extras


def test_the_license_is_named_and_complete():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert text.split()[:2] == ["Apache", "License"] and "END OF TERMS AND CONDITIONS" in text and "APPENDIX" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license"] == "Apache-2.0" and all((ROOT / name).is_file() for name in project["license-files"])
    assert "[Apache-2.0](LICENSE)" in README


def test_quoted_messages_exist():
    """The messages that the troubleshooting table quotes are still what the program prints."""
    table = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    source = "".join(path.read_text("utf-8") for path in (ROOT / "lorawgpu").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a message may span several literals
    assert len(quoted) > 2 and [message for message in quoted if message not in source] == []


def test_every_command_has_its_line():
    assert all(f"| `lorawgpu {command}" in README for command in COMMANDS)
