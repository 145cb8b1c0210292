"""Records that a program passes instead of a file: written to the cache as JSON lines, under the name of their content.

So a resumed run finds the same file, and the config in its run folder stays true.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.untrusted import brief

FOLDER = "records"  # in the cache


def write_records(where: str, records: Sequence[Any], cache: Path | None) -> str:
    """The path of a file with `records`, in which a string is a text; in the temporary folder without a cache.

    UserError, with `where` and the number of the record, for one that is not JSON, or if there are none.
    """
    if not records:
        raise UserError(f"{where} is an empty list; wanted at least one record")
    text = "".join(f"{_line(where, number, record)}\n" for number, record in enumerate(records, 1)).encode()
    folder = (cache or Path(tempfile.gettempdir()) / "lorawgpu") / FOLDER
    path = folder / f"{hashlib.sha256(text).hexdigest()[:32]}.jsonl"
    try:
        if not path.is_file() or path.read_bytes() != text:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, text)
    except OSError as error:
        raise UserError(f"{where}: {path} cannot be written: {error.strerror}; set dataset_prepared_path") from None
    return str(path.absolute())


def _line(where: str, number: int, record: Any) -> str:
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, dict):
        raise UserError(f"{where}, record {number}: got {brief(record)}; wanted a record (a dict) or a text")
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}, record {number}: not JSON: {error}") from None
