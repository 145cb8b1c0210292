"""Several ranks take one step: the same gradient, divisor, loss and bad flag everywhere, and only one rank writes."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from gradcheck import relative_error
from ranks import Ranks
from tiny_model import Tiny, random_samples, tiny_config
from tiny_run import adapter_bytes, losses, write_config, write_data

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.evaluation import evaluate_source
from lorawgpu.engine.exchange import Solo, share
from lorawgpu.engine.objective import CausalLM
from lorawgpu.engine.shards import pieces_of
from lorawgpu.train import trainer as trainer_module
from lorawgpu.train.metrics import read_metrics

STATE = ("params", "m", "v")


@pytest.fixture(scope="module")
def tiny(device, kernels):
    return Tiny(device, kernels, tiny_config())


def micro_batches():
    """Micro-batches with different lengths, capacities and target counts, one without a target."""
    a, b, c, d, e = random_samples((9, 14, 20, 40, 12))
    mute = replace(e, labels=np.full_like(e.labels, -100))
    return [flatten([a, b], 64), flatten([c], 32), flatten([mute], 16), flatten([d], 64)]


def state_of(engine):
    return {which: engine.tensors(which) for which in (*STATE, "grads")}


def same(a, b, parts=STATE):
    return all(np.array_equal(a[part][name], b[part][name]) for part in parts for name in a[part])


def step_on_ranks(tiny, size, batches, steps=1, **options):
    """What each rank holds after some optimizer steps over the same batches, exchanged in many pieces."""
    options = {"piece_bytes": 1024} | options

    def work(exchange):
        engine = tiny.engine(exchange=exchange, **options)
        divisors = [engine.step(batches, number, 1e-3) for number in range(1, steps + 1)]
        return divisors[-1], engine.loss_sum(), engine.grad_norm(), state_of(engine), engine.steps_state()

    return Ranks(size).run(work)


@pytest.mark.parametrize("size", [2, 3])
def test_the_step_of_all_ranks_is_that_of_one(tiny, size):
    """With dropout, whose mask depends on a micro-batch's index in the whole step."""
    batches, options = micro_batches(), {"dropout": 0.2, "seed": 5}
    (alone,) = step_on_ranks(tiny, 1, batches, **options)
    ranks = step_on_ranks(tiny, size, batches, **options)
    for divisor, loss, norm, state, _ in ranks:
        assert divisor == alone[0] == sum(b.targets for b in batches)
        assert loss == alone[1]  # fixed-point sums are exact in any order
        assert norm == pytest.approx(alone[2], rel=1e-6)
        for name, grad in state["grads"].items():  # float32 sums in a different order
            assert relative_error(grad, alone[3]["grads"][name]) < 1e-6, name
        assert same(state, ranks[0][3], (*STATE, "grads"))


def test_a_single_rank_has_the_bits_of_none(tiny):
    batches = micro_batches()
    engine = tiny.engine()
    assert isinstance(engine.exchange, Solo)
    engine.step(batches, 1, 1e-3)
    ((_, loss, norm, state, _),) = step_on_ranks(tiny, 1, batches)
    assert (loss, norm) == (engine.loss_sum(), engine.grad_norm()) and same(state, state_of(engine), (*STATE, "grads"))


def test_a_rank_without_a_micro_batch_takes_part(tiny):
    batches = micro_batches()[:1]
    (alone,) = step_on_ranks(tiny, 1, batches)
    for rank in step_on_ranks(tiny, 2, batches):
        assert rank[:3] == alone[:3] and same(rank[3], alone[3])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_step_of_one_rank_is_skipped_by_all(tiny, bad):
    batches = micro_batches()
    good = step_on_ranks(tiny, 2, batches, objective=partial(CausalLM, weighted=True))[0]
    poison = np.full(batches[bad].targets, np.inf, np.float32)
    poisoned = [replace(b, row_weights=poison) if i == bad else b for i, b in enumerate(batches)]

    def work(exchange):
        engine = tiny.engine(objective=partial(CausalLM, weighted=True), exchange=exchange)
        engine.step(batches, 1, 1e-3)
        engine.step(poisoned, 2, 1e-3)
        return state_of(engine), engine.steps_state(), engine.non_finite.names

    for state, steps, names in Ranks(2).run(work):
        assert same(state, good[3])
        assert (steps.bad, steps.bad_run, steps.bad_total, steps.steps) == (True, 1, 1, 2)
        assert names[steps.record] == "loss"


class Samples(list):
    @property
    def lengths(self):
        return np.array([len(s) for s in self])


def test_an_evaluation_is_shared_out_and_summed(tiny):
    source = Samples(random_samples((60, 30, 50, 7)))

    def work(exchange):
        engine = tiny.engine(exchange=exchange)
        return [evaluate_source(engine, source, adapter) for adapter in (True, False)]

    alone = work(Solo())
    assert alone[0] != alone[1]
    assert Ranks(2).run(work) == [alone, alone]
    nothing = Samples([Sample(s.input_ids, np.full_like(s.labels, -100)) for s in source])
    with pytest.raises(ValueError, match="no sample has a target"):
        Ranks(2).run(lambda exchange: evaluate_source(tiny.engine(exchange=exchange), nothing))


@pytest.mark.parametrize("shares", [(1,), (1, 1), (2, 2), (1, 3), (5, 1, 2)])
def test_every_item_is_computed_once_by_ranks_in_turn(shares):
    items = list("abcdefghijklm")
    found = [list(share(rank, shares, items)) for rank in range(len(shares))]
    assert sorted(pair for part in found for pair in part) == list(enumerate(items))
    step = items[: sum(shares)]
    assert tuple(len(list(share(rank, shares, step))) for rank in range(len(shares))) == shares
    first = [next(share(rank, shares, items))[0] for rank in range(len(shares))]
    assert max(first) < 2 * len(shares)  # so that a short step does not leave a rank idle


def test_pieces_cover_the_adapter_from_the_last_layer_down(tiny):
    layout = tiny.engine().adapter.layout
    for piece_bytes in (256, 1024, 1 << 20):
        pieces = pieces_of(layout, piece_bytes)
        assert [pieces[0].stop, pieces[-1].start] == [layout.size, 0]
        assert all(a.start == b.stop and a.layer >= b.layer for a, b in pairwise(pieces))
        for piece in pieces:
            inside = {
                layer for (layer, _), g in layout.groups.items() if piece.start <= g.paths[0].a.start < piece.stop
            }
            assert all(layer >= piece.layer for layer in inside)
            for size in (1, 2, 3, 7):
                parts = [piece.part(rank, size) for rank in range(size)]
                assert [parts[0][0], parts[-1][1]] == [piece.start, piece.stop]
                assert all(a[1] == b[0] and a[0] % 64 == 0 for a, b in pairwise(parts))
    assert len(pieces_of(layout, 1024)) > 4 and len(pieces_of(layout, 1 << 20)) == 1


@pytest.mark.parametrize("shares", [(1, 3), (2, 1, 1)])
def test_unequal_shares_leave_the_mathematics_as_it_is(tiny, shares):
    batches = micro_batches()
    options = {"dropout": 0.2, "seed": 5, "steps": 3}
    (alone,) = step_on_ranks(tiny, 1, batches, **options)
    ranks = step_on_ranks(tiny, len(shares), batches, shares=shares, **options)
    for _, loss, norm, state, _ in ranks:
        assert loss == pytest.approx(alone[1], rel=1e-6) and norm == pytest.approx(alone[2], rel=1e-5)
        assert same(state, ranks[0][3])
        for name, value in state["params"].items():
            update, wanted = value - tiny.tensors[name], alone[3]["params"][name] - tiny.tensors[name]
            assert relative_error(update, wanted) < 1e-4, name


def test_moments_of_all_ranks_go_back_to_their_owners(tiny):
    def work(exchange):
        engine = tiny.engine(exchange=exchange, piece_bytes=1024)
        engine.step(micro_batches(), 1, 1e-3)
        before = state_of(engine)
        other = tiny.engine(exchange=exchange, piece_bytes=512)  # other pieces, so other shards
        for part in STATE:
            other.load(part, before[part])
        return same(before, state_of(other)), engine.adapter.m.size

    found = Ranks(3).run(work)
    assert all(equal for equal, _ in found)
    assert sum(size for _, size in found) == tiny.engine().adapter.layout.size


# Whole runs


class Signals:
    """Stands for Interrupts, which belong to a process and its main thread."""

    signum = None

    def __init__(self, notice):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def config_of(folder, data, **keys):
    """Held-out data, accumulation and dropout. Each rank gets its own run folder, which only rank 0 may write."""
    defaults = {
        "datasets": [{"path": str(data)}],
        "val_set_size": 3,
        "eval_steps": 2,
        "micro_batches_per_rank": [3],
        "lora_dropout": 0.1,
        "max_steps": 5,
        "save_steps": 2,
        "adam_epsilon": 1e-3,
    }
    return write_config(folder, **(defaults | keys))


def run_on_ranks(tmp_path, runs, data, kinds, resume=None, **keys):
    """Three micro-batches a step, as in a run of one process. `resume`: as for Runs.trainer."""
    keys = {"micro_batches_per_rank": [2, 1]} | keys
    configs = [config_of(tmp_path / f"rank{n}", data, **keys) for n in range(len(kinds))]

    def work(exchange):
        trainer = runs.trainer(configs[exchange.rank], resume, kind=kinds[exchange.rank], exchange=exchange)
        return trainer.train(), trainer.engine.tensors(), trainer.state

    return Ranks(len(kinds)).run(work)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "Interrupts", Signals)
    return write_data(tmp_path / "d.jsonl", samples=17)


def test_a_run_of_two_ranks_is_that_of_one_and_one_of_them_writes(tmp_path, runs, data, capsys):
    alone = runs.train(config_of(tmp_path / "alone", data))
    capsys.readouterr()
    (code, tensors, standing), (other_code, other, follows) = run_on_ranks(
        tmp_path, runs, data, [trainer_module.Trainer] * 2
    )
    folder = tmp_path / "rank0" / "out"
    assert code == other_code == 0 and replace(standing, logged=0) == follows  # one of them counts records
    assert all(np.array_equal(t, other[name]) for name, t in tensors.items())
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    for key in ("base_eval_loss", "eval_loss", "eval_tokens", "epoch"):
        of_ranks, of_one = ([r[key] for r in read_metrics(f / "metrics.jsonl") if key in r] for f in (folder, alone))
        assert of_ranks and of_ranks == pytest.approx(of_one, rel=1e-5), key
    assert {p.name for p in folder.iterdir()} == {p.name for p in alone.iterdir()} and adapter_bytes(folder)
    assert not (tmp_path / "rank1" / "out").exists()
    out, err = capsys.readouterr()
    assert err.count("step 5/5 loss") == 1 and out.count("5 steps") == 1


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path, runs, data, monkeypatch):
    class Stopped(trainer_module.Trainer):
        """A rank that gets SIGTERM during step 3."""

        def _loop(self, interrupts):
            self.interrupts = interrupts
            super()._loop(interrupts)

        def _step(self, batch):
            super()._step(batch)
            if self.state.step == 3:
                self.interrupts.signum = 15

    found = run_on_ranks(tmp_path, runs, data, [trainer_module.Trainer, Stopped])
    assert [(code, standing.step) for code, _, standing in found] == [(143, 3)] * 2
    assert (tmp_path / "rank0" / "out" / "checkpoint-3").is_dir() and not (tmp_path / "rank1" / "out").exists()


def test_a_resumed_run_of_two_ranks_is_bit_equal(tmp_path, runs, data):
    """The other rank has no checkpoint on its own disk; the moments that the first one saved are those of both."""
    kinds = [trainer_module.Trainer] * 2
    keys = {"lr_scheduler": "constant", "save_steps": 1}
    ((_, whole, state), _) = run_on_ranks(tmp_path / "whole", runs, data, kinds, **keys)
    run_on_ranks(tmp_path / "cut", runs, data, kinds, max_steps=2, **keys)
    checkpoint = str(tmp_path / "cut" / "rank0" / "out" / "checkpoint-2")
    found = run_on_ranks(tmp_path / "cut", runs, data, kinds, resume=checkpoint, **keys)
    for _, tensors, standing in found:
        assert replace(standing, logged=0) == replace(state, logged=0)
        assert all(np.array_equal(t, whole[name]) for name, t in tensors.items())
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    last = [tmp_path / run / "rank0" / "out" / "checkpoint-5" for run in ("whole", "cut")]
    assert all(len({(folder / name).read_bytes() for folder in last}) == 1 for name in names)
