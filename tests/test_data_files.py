"""Data files of every format and compression, read into records with line numbers; errors name the file and line."""

import gzip
import json
import sys
from types import ModuleType

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.find_files import files_to_train, find_files
from lorawgpu.data.read_files import parse, read
from lorawgpu.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}


def records(path):
    return [(line, parse("f", line, raw)) for line, raw in read(path)]


def write(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_jsonl_with_bom_crlf_and_blank_lines(tmp_path):
    path = write(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "tw\xc3\xb6"}\r\n  \n\n')
    assert records(path) == [(1, {"text": "one"}), (3, {"text": "twö"})]


def test_a_line_of_ten_megabytes(tmp_path):
    long = "x" * (10 << 20)
    path = write(tmp_path, "a.jsonl", json.dumps({"text": long}) + "\n" + '{"text": "y"}')
    assert [(n, len(r["text"])) for n, r in records(path)] == [(1, len(long)), (2, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"f, line 2: not valid JSON \(Expecting ',' delimiter at column 13\): {\"text\": \"a\""),
        (b'["text"]', r"f, line 2: wanted a JSON object, got list: \[\"text\"\]"),
        (b'{"text": "caf\xe9"}', r"f, line 2: not valid UTF-8 \(byte 0xe9 at byte 14 of the line\)"),
        (b'{"n": ' + b"9" * 5000 + b"}", r"f, line 2: not valid JSON \(Exceeds the limit"),
        (b"[" * 100_000, r"f, line 2: not valid JSON \(maximum recursion"),
    ],
)
def test_a_bad_line_is_named_with_an_excerpt(tmp_path, line, message):
    path = write(tmp_path, "a.jsonl", b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(BadLine, match="^" + message) as error:
        records(path)
    assert len(str(error.value)) < 300


def test_elements_of_a_json_array_know_their_line(tmp_path):
    path = write(tmp_path, "a.json", '\ufeff[\n {"text": "a"},\n\n {"text":\n "b"}, {"text": "c"}\n]\n')
    assert records(path) == [(2, {"text": "a"}), (4, {"text": "b"}), (5, {"text": "c"})]
    assert records(write(tmp_path, "empty.json", " [ ] ")) == []
    assert records(write(tmp_path, "lines.json", '{"text": "a"}\n{"text": "b"}')) == [
        (1, {"text": "a"}),
        (2, {"text": "b"}),
    ]


@pytest.mark.parametrize(
    "data",
    [
        '[{"a": 1},\n{"a": 2}][{"a": 3}]',
        '[{"a": 1}\n] more',
        "[\n] 1",
        '[{"a": 1},\n{"a": }]',
        '[{"a": 1},\n]',
        '[{"a": 1}\n,{"b": 1} {"c": 2}]',
        '[{"a": 1},\n{"b"',
    ],
)
def test_a_broken_array_names_the_line(tmp_path, data):
    with pytest.raises(UserError, match="a.json, line 2: not valid JSON"):
        records(write(tmp_path, "a.json", data))


def test_csv_with_quoted_lines_and_lists_in_cells(tmp_path):
    path = write(tmp_path, "a.csv", '\ufeffprompt,completion\r\n"two\r\nlines",x\r\n\r\n"a ""b""",\r\n')
    assert records(path) == [
        (2, {"prompt": "two\r\nlines", "completion": "x"}),
        (5, {"prompt": 'a "b"', "completion": ""}),
    ]
    cell = json.dumps(CHAT["messages"]).replace('"', '""')
    assert records(write(tmp_path, "m.csv", f'messages\n"{cell}"\n')) == [(2, CHAT)]


def test_a_csv_row_of_the_wrong_width_is_named(tmp_path):
    path = write(tmp_path, "a.csv", "prompt,completion\na,b\na,b,c\nd,e\n")
    (_, _), (line, bad), (_, last) = read(path)
    assert line == 3 and "line 3: 3 cells" in str(bad) and "a,b,c" in str(bad)
    assert last == {"prompt": "d", "completion": "e"}


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_csv_with_another_separator_is_rejected(tmp_path, mark):
    path = write(tmp_path, "a.csv", f"prompt{mark}completion\na{mark}b\n")
    with pytest.raises(UserError, match="a.csv, line 1: .* save it with commas"):
        records(path)


def test_a_csv_header_with_a_duplicate_column_is_rejected(tmp_path):
    path = write(tmp_path, "a.csv", "text,b,text\na,b,c\n")
    with pytest.raises(UserError, match="a.csv, line 1: two columns .* 'text'"):
        records(path)
    assert records(write(tmp_path, "b.csv", "text,,\na,,\n")) == [(2, {"text": "a", "": ""})]  # a sheet's empty columns


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [CHAT | {"note": None}, {"messages": CHAT["messages"][:1], "note": "x"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert records(tmp_path / "a.parquet") == [(1, CHAT), (2, rows[1])]
    with pytest.raises(UserError, match="bad.parquet: not a readable Parquet file"):
        records(write(tmp_path, "bad.parquet", b"PAR1 no"))


def test_compressed_files(tmp_path):
    data = b'{"text": "a"}\n{"text": "b"}\n'
    expected = [(1, {"text": "a"}), (2, {"text": "b"})]
    assert records(write(tmp_path, "a.jsonl.gz", gzip.compress(data))) == expected
    assert records(write(tmp_path, "a.csv.gz", gzip.compress(b"text\na\n"))) == [(2, {"text": "a"})]
    with pytest.raises(UserError, match="cannot be read"):
        records(write(tmp_path, "cut.jsonl.gz", gzip.compress(data * 1000)[:60]))
    zstandard = pytest.importorskip("zstandard")
    assert records(write(tmp_path, "a.jsonl.zst", zstandard.compress(data))) == expected
    frames = zstandard.compress(data[:14]) + zstandard.compress(data[14:])
    assert records(write(tmp_path, "b.jsonl.zst", frames)) == expected
    with pytest.raises(UserError, match="cannot be read"):
        records(write(tmp_path, "bad.jsonl.zst", b"nothing of the kind"))


def test_folders_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    names = ["b.jsonl", "a.csv", "sub/c.json.gz"]
    for name in [*names, "README.md"]:
        write(tmp_path, name, "")
    assert find_files(str(tmp_path)).used == sorted(tmp_path / n for n in names)
    assert find_files(str(tmp_path / "*.jsonl")).used == [tmp_path / "b.jsonl"]
    assert find_files(str(tmp_path / "**" / "*.json*")).used == [tmp_path / "b.jsonl", tmp_path / "sub" / "c.json.gz"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "no such file"),
        ("*.csv", "the pattern matches no files ending in .jsonl"),
        (".", "the folder contains no files"),
        ("README.md", "unknown file format"),
    ],
)
def test_data_that_is_not_there(tmp_path, name, message):
    write(tmp_path, "README.md", "")
    with pytest.raises(UserError, match=message):
        find_files(str(tmp_path / name))


def test_a_hub_data_set_gives_its_training_files(tmp_path, monkeypatch):
    class Hub(ModuleType):
        class HfApi:
            def repo_info(self, name, repo_type):
                pass

            def list_repo_files(self, name, repo_type):
                return Hub.names

        names = ["README.md", "data/test-0.parquet", "data/train-1.parquet", "data/train-0.parquet"]

        @staticmethod
        def hf_hub_download(name, file, repo_type):
            if "gone" in file:
                raise RuntimeError("404 no such file\nlong trace")
            return str(tmp_path / file)

    (tmp_path / "README.md").touch()
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub("huggingface_hub"))
    assert files_to_train("owner/set").used == [tmp_path / "data/train-0.parquet", tmp_path / "data/train-1.parquet"]
    assert files_to_train("owner/set", "test").used == [tmp_path / "data/test-0.parquet"]
    with pytest.raises(UserError, match="owner/set, on the hub: no file is of the split `dev`; it has test, train"):
        files_to_train("owner/set", "dev")
    Hub.names = ["b.jsonl", "a.csv"]
    assert files_to_train("owner/set").used == [tmp_path / "a.csv", tmp_path / "b.jsonl"]
    Hub.names = ["gone.csv"]
    with pytest.raises(UserError, match="owner/set: no such file or folder here, and .*: 404 no such file$"):
        find_files("owner/set")
    Hub.names = ["README.md"]
    with pytest.raises(UserError, match="no files ending in"):
        find_files("owner/set")


def test_an_unknown_built_in_data_set_is_named():
    with pytest.raises(UserError, match="builtin:nothing: no built-in data set .* available: "):
        find_files("builtin:nothing")


def test_a_zstandard_file_that_was_cut_off_is_refused(tmp_path):
    """gzip notices by itself. Frames one after another are one file, as `zstd` concatenates them."""
    lines = "".join(f'{{"text": "{i} {hash(str(i))}"}}\n' for i in range(9000)).encode()
    pack = zstandard.ZstdCompressor().compress
    whole = pack(lines)
    (tmp_path / "a.jsonl.zst").write_bytes(whole + pack(b'{"text": "b"}\n'))
    assert len(records(tmp_path / "a.jsonl.zst")) == 9001
    for cut in (whole[: len(whole) // 2], whole[:-1], whole[:5], whole + whole[:-4]):
        (tmp_path / "b.jsonl.zst").write_bytes(cut)
        with pytest.raises(UserError, match=r"b.jsonl.zst: cannot be read: it ends in the middle .* was cut off"):
            records(tmp_path / "b.jsonl.zst")
    (tmp_path / "c.jsonl.zst").write_bytes(whole + b"no frame")
    with pytest.raises(UserError, match=r"c.jsonl.zst: cannot be read"):
        records(tmp_path / "c.jsonl.zst")


def test_times_in_parquet_are_text(tmp_path):
    """Wanted: ISO 8601, as Arrow's documentation of casts has it; pandas' default is nanoseconds."""
    rows = {
        "text": ["a", "b"],
        "ns": pyarrow.array([1_700_000_000_000_000_001, None], pyarrow.timestamp("ns")),
        "zoned": pyarrow.array([0, 1], pyarrow.timestamp("us", "UTC")),
        "day": pyarrow.array([0, 2**31 - 1], pyarrow.date32()),
        "time": pyarrow.array([1, 2], pyarrow.time64("ns")),
        "took": pyarrow.array([5, 6], pyarrow.duration("ns")),
        "turns": pyarrow.array([[{"at": 0, "role": "user"}], []], pyarrow.list_(
            pyarrow.struct([("at", pyarrow.timestamp("ns")), ("role", pyarrow.string())]))),
    }  # fmt: skip
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    (_, first), (_, second) = records(tmp_path / "a.parquet")
    assert first["text"] == "a" and second["text"] == "b" and "ns" not in second
    assert first["ns"] == "2023-11-14 22:13:20.000000001" and first["day"] == "1970-01-01" and first["took"] == 5
    assert first["zoned"].startswith("1970-01-01 00:00:00") and first["time"] == "00:00:00.000000001"
    assert first["turns"] == [{"at": "1970-01-01 00:00:00.000000000", "role": "user"}]


def test_a_cell_that_is_no_utf8_spoils_its_row_alone(tmp_path):
    ends = pyarrow.array([0, 1, 3, 4], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, ends, pyarrow.py_buffer(b"a\xff\xfec")])
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    first, bad, last = [raw for _, raw in read(tmp_path / "a.parquet")]
    assert first == {"text": "a"} and last == {"text": "c"}
    assert isinstance(bad, BadLine) and "a.parquet, line 2: a cell is not valid UTF-8" in str(bad)


@pytest.mark.parametrize("cell", ["[" * 100_000, "[" + "9" * 5000 + "]"])
def test_cells_that_no_parser_takes_stay_text(tmp_path, cell):
    assert records(write(tmp_path, "a.csv", f'messages\n"{cell}"\n')) == [(2, {"messages": cell})]


def test_many_columns_take_no_longer_than_their_number(tmp_path):
    names = ",".join(f"c{i}" for i in range(300_000))
    (_, row) = records(write(tmp_path, "a.csv", f"{names}\n{',' * 299_999}\n"))[0]
    assert len(row) == 300_000
