"""Files of strangers: each one loads or ends in one clear message, whatever is in it."""

import sys
from collections import Counter

import pytest
from breadth import seeds

from lorawgpu.guard.limits import MAX_REPLY
from lorawgpu.util.printable import message

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="measures processes through /proc")]

MIB = 1 << 20
FREE = 64 * MIB  # what a reader may take whatever the size of the file: its chunks, and libraries that wake up
MULTIPLE = 64  # and per byte of the file: Python's lists and dicts of small JSON values take about 40
LONGEST = 1000  # characters of a message, as commands print it
SHOWN = 3  # messages of each kind in the output


def wrong(verdict, hostile, folder) -> str:
    """What is wrong with how a file was received; empty when nothing is."""
    if verdict.outcome not in ("loaded", "refused"):
        return f"{verdict.outcome}: {verdict.message}"
    stops = ("expands more than", "took longer than", "took more than")
    if hostile.kind == "data" and "bomb" in hostile.how and not any(stop in verdict.message for stop in stops):
        return f"was read to its end: {verdict.message}"
    reply = 2 * MAX_REPLY if hostile.kind in ("template", "tokenizer", "data") else 0  # what a worker may send back
    if verdict.peak > FREE + reply + MULTIPLE * len(hostile.content):
        return f"took {verdict.peak / MIB:.0f} MiB for {len(hostile.content) / MIB:.3f} MiB"
    if verdict.outcome == "refused" and not 10 < len(message(verdict.message)) <= LONGEST:
        return f"a message of {len(verdict.message)} characters: {verdict.message[:100]!r}"
    if verdict.outcome == "refused" and str(folder) not in verdict.message and "chat template" not in verdict.message:
        return f"names no file of the folder: {verdict.message[:200]!r}"
    return ""


@pytest.mark.parametrize("seed", seeds())
def test_hostile_files(tmp_path, capsys, seed):
    from hostile.born import corpus
    from hostile.judge import Judge

    counts, faults, shown = Counter(), [], {}
    with Judge() as judge:
        for number, (good, hostile) in enumerate(corpus(seed)):
            folder = tmp_path / str(number)
            folder.mkdir()
            good.place(folder)
            path = folder / good.file
            path.write_bytes(hostile.content)
            verdict = judge(hostile.kind, path)
            counts[hostile.kind, verdict.outcome] += 1
            if fault := wrong(verdict, hostile, folder):
                faults.append(f"{hostile.kind} {hostile.file} #{number} ({hostile.how}): {fault}")
            elif verdict.outcome == "refused":
                shown.setdefault(hostile.kind, {})[verdict.message.replace(str(folder), "")] = hostile.how
    with capsys.disabled():
        print(f"\n{sum(counts.values())} hostile files, seed {seed}:")
        for kind in dict.fromkeys(kind for kind, _ in counts):
            print(f"  {kind}: " + ", ".join(f"{n} {what}" for (k, what), n in counts.items() if k == kind))
            some = list(shown.get(kind, {}).items())
            for message, how in some[:: max(1, len(some) // SHOWN)][:SHOWN]:
                print(f"      {how}: {message[:160]}")
    assert not faults, "\n".join(faults)
    assert sum(counts.values()) >= 200
    assert all(counts[kind, "refused"] for kind, _ in counts if kind != "metrics")  # there a torn line is no error


def test_the_judge_tells_a_good_file_and_a_crash(tmp_path):
    """A corpus that cannot fail proves nothing."""
    from hostile.judge import Judge
    from hostile.seeds import SEEDS

    with Judge() as judge:
        for number, good in enumerate(SEEDS):
            folder = tmp_path / str(number)
            folder.mkdir()
            good.place(folder)
            verdict = judge(good.kind, folder / good.file)
            assert verdict.outcome == "loaded", (good.kind, good.file, verdict)
