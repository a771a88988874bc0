"""A worker that follows a run: exact, whole or not at all, and honest about what it has lost."""

import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from logra.errors import LograError, PacketError, SyncError
from logra.integrations.vllm import session as session_module
from logra.integrations.vllm import sleep, workers
from logra.integrations.vllm.messages import InitInfo, UpdateInfo, anchor_info, to_text
from logra.integrations.vllm.session import Session
from logra.integrations.vllm.workers import Workers
from logra.sync import Piece


def joined(tools, trainer, **options) -> Session:
    engine = tools.build_engine(trainer.weights[0], dtype=options.pop("dtype", torch.float32))
    session = Session(engine)
    session.join(InitInfo(manifest=trainer.manifest.to_json(), **options))
    return session


def send(session, update) -> None:
    session.receive(UpdateInfo(packet=update.to_bytes()))


def weights_of(tools, session):
    return tools.assemble([session._replica.layout])


def anchor(weights, version, *, is_last=True) -> UpdateInfo:
    return UpdateInfo(**anchor_info(save(weights), version, is_last=is_last))


# ---- exactness ----


@pytest.mark.parametrize("storage", ["fp32", "split32", "split24"])
def test_packets_make_the_trainers_bits_in_the_parameters(tools, trainers, storage):
    # Catches a merge rule that follows the dtype of the engine, and rows of a fused tensor that are mixed up.
    trainer = trainers[storage]
    session = joined(tools, trainer)
    for update in trainer.updates:
        send(session, update)
        tools.assert_same_bits(weights_of(tools, session), trainer.weights[update.version])
    assert session.state()["version"] == len(trainer.updates)


def test_parameters_keep_their_memory(tools, trainer):
    # Catches a parameter that is replaced: CUDA graphs would go on reading the old one.
    session = joined(tools, trainer)
    before = [parameter.data_ptr() for parameter in session._model.parameters()]
    send(session, trainer.updates[0])
    session.receive(anchor(trainer.weights[2], 2))
    assert [parameter.data_ptr() for parameter in session._model.parameters()] == before


@pytest.mark.parametrize(("storage", "low"), [("split32", torch.int16), ("split24", torch.int8)])
def test_a_bf16_engine_is_exact_with_a_low_plane_in_host_memory(tools, trainers, storage, low):
    trainer = trainers[storage]
    session = joined(tools, trainer, dtype=torch.bfloat16)
    assert session.state()["storage"] == storage
    for update in trainer.updates:
        send(session, update)
        if update.version == 2:  # full weights in between fit the planes that are there
            session.receive(anchor(trainer.weights[2], 2))
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[-1])
    piece = session._replica.layout["model.layers.0.mlp.up_proj.weight"].pieces[0]
    assert piece.tensor.dtype == torch.bfloat16
    assert (piece.lo.device.type, piece.lo.dtype) == ("cpu", low)
    # What the engine computes with is the trainer's weight, rounded to nearest.
    assert torch.equal(piece.tensor, trainer.weights[-1]["model.layers.0.mlp.up_proj.weight"].bfloat16())


def begun_with_an_anchor(tools, trainer, low_plane, device="cpu") -> Session:
    engine = tools.build_engine(trainer.weights[1], dtype=torch.bfloat16).to(device)
    session = Session(engine)
    session.join(InitInfo(manifest=trainer.manifest.to_json(), low_plane=low_plane, anchor_follows=True))
    session.receive(anchor(trainer.weights[1], 1))
    return session


@pytest.mark.parametrize(("storage", "low"), [("split32", torch.int16), ("split24", torch.int8)])
@pytest.mark.parametrize("low_plane", ["host", "device"])
def test_low_planes_that_begin_with_an_anchor_lie_where_they_shall(
    tools, trainers, monkeypatch, storage, low, low_plane
):
    # Catches an option that only updates follow. All planes are made by `add_low`, whose devices tests/sync/test_layout.py
    # has; here, what it was told.
    made = []
    add_low = Piece.add_low
    monkeypatch.setattr(Piece, "add_low", lambda self, *args: (made.append(self.low_on_host), add_low(self, *args))[1])
    trainer = trainers[storage]
    session = begun_with_an_anchor(tools, trainer, low_plane)
    pieces = {name: placement.pieces[0] for name, placement in session._replica.layout.items()}
    assert len(made) == len(pieces) and all(piece.lo is not None for piece in pieces.values())
    for update in trainer.updates[1:]:
        send(session, update)
    assert set(made) == {low_plane == "host"}
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[-1])
    name = "model.layers.0.mlp.up_proj.weight"
    assert (pieces[name].lo.dtype, pieces["model.norm.weight"].lo.dtype) == (low, torch.int16)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["split32", "split24"])
def test_on_a_gpu_the_planes_of_an_anchor_stay_in_pinned_memory(tools, trainers, storage):
    trainer = trainers[storage]
    session = begun_with_an_anchor(tools, trainer, "host", "cuda")
    for update in (None, *trainer.updates[1:]):
        if update is not None:
            send(session, update)
        for placement in session._replica.layout.values():
            for piece in placement.pieces:
                assert (piece.tensor.device.type, piece.lo.device.type, piece.lo.is_pinned()) == ("cuda", "cpu", True)
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[-1])


def test_a_bf16_engine_of_an_fp32_run_needs_its_base_in_fp32(tools, trainer):
    # The base model's fp32 values do not fit into the engine's bf16 weights: only an anchor has the rest.
    engine = tools.build_engine(trainer.weights[0], dtype=torch.bfloat16)
    session = Session(engine)
    with pytest.raises(SyncError, match="bf16 values"):
        session.join(InitInfo(manifest=trainer.manifest.to_json()))
    session.receive(anchor(trainer.weights[0], 0))
    for update in trainer.updates:
        send(session, update)
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[-1])


def test_bf16_without_a_low_plane_says_how_far_it_may_be(tools, trainers):
    trainer = trainers["split32"]
    session = joined(tools, trainer, dtype=torch.bfloat16, storage="bf16")
    for update in trainer.updates:
        send(session, update)
    state = session.state()
    assert state["storage"] == "bf16"
    assert state["drift_bound"] > 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights_of(tools, session)[name], trainer.weights[-1][name])


class Ranks:
    """Two workers in two threads, with a group that gathers as torch.distributed does."""

    def __init__(self, tools, trainer, monkeypatch, spoil=None):
        barrier, shared = threading.Barrier(2, timeout=30), {}

        def all_gather_object(result, value, group):
            shared[group] = value
            barrier.wait()
            result[:] = [shared[0], shared[1]]
            barrier.wait()

        monkeypatch.setattr(workers.dist, "all_gather_object", all_gather_object)
        engines = [tools.build_engine(trainer.weights[0], rank, 2) for rank in range(2)]
        if spoil is not None:
            spoil(engines[0])
        groups = [SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=rank) for rank in range(2)]
        self.sessions = [Session(engine, Workers(group)) for engine, group in zip(engines, groups, strict=True)]

    def call(self, method, *args):
        """The error of each worker, or None."""
        errors: list[Exception | None] = [None, None]

        def run(rank):
            try:
                getattr(self.sessions[rank], method)(*args)
            except Exception as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def assert_only_the_last_raises(self, errors, kind):
        # vLLM's executor stops at the first error and would take later answers for those of the next call.
        assert errors[0] is None
        assert isinstance(errors[1], kind)


def test_workers_with_a_part_of_the_weights_agree_on_the_digest(tools, trainer, monkeypatch):
    # Catches digests that are skipped because no worker has all weights: update 2 and 4 carry one.
    ranks = Ranks(tools, trainer, monkeypatch)
    assert ranks.call("join", InitInfo(manifest=trainer.manifest.to_json())) == [None, None]
    for update in trainer.updates:
        assert ranks.call("receive", UpdateInfo(packet=update.to_bytes())) == [None, None]
    layouts = [session._replica.layout for session in ranks.sessions]
    tools.assert_same_bits(tools.assemble(layouts), trainer.weights[-1])


def test_all_workers_refuse_if_one_began_from_other_weights(tools, trainer, monkeypatch):
    def spoil(engine):
        engine.model.layers[0].mlp.down_proj.weight[0, 0] += 1

    ranks = Ranks(tools, trainer, monkeypatch, spoil)
    init = InitInfo(manifest=trainer.manifest.to_json())
    ranks.assert_only_the_last_raises(ranks.call("join", init), SyncError)
    # Catches an engine that forgets the refusal, and follows when it is asked again.
    ranks.assert_only_the_last_raises(ranks.call("join", init), SyncError)
    assert all(session.state()["needs_anchor"] for session in ranks.sessions)
    assert ranks.call("receive", anchor(trainer.weights[1], 1)) == [None, None]
    assert ranks.call("receive", UpdateInfo(packet=trainer.updates[1].to_bytes())) == [None, None]
    layouts = [session._replica.layout for session in ranks.sessions]
    tools.assert_same_bits(tools.assemble(layouts), trainer.weights[2])


def test_a_refused_update_is_told_once_and_leaves_all_workers_sound(tools, trainer, monkeypatch):
    ranks = Ranks(tools, trainer, monkeypatch)
    ranks.call("join", InitInfo(manifest=trainer.manifest.to_json()))
    errors = ranks.call("receive", UpdateInfo(packet=trainer.updates[1].to_bytes()))
    ranks.assert_only_the_last_raises(errors, PacketError)
    assert [session.state()["needs_anchor"] for session in ranks.sessions] == [None, None]
    assert ranks.call("receive", UpdateInfo(packet=trainer.updates[0].to_bytes())) == [None, None]


def test_what_fails_on_one_worker_alone_is_a_loss_of_all(tools, trainer, monkeypatch):
    # Catches workers at different versions: one has applied the update, the other has not.
    ranks = Ranks(tools, trainer, monkeypatch)
    ranks.call("join", InitInfo(manifest=trainer.manifest.to_json()))
    monkeypatch.setattr(ranks.sessions[0]._replica, "apply", lambda update: (_ for _ in ()).throw(MemoryError("full")))
    errors = ranks.call("receive", UpdateInfo(packet=trainer.updates[0].to_bytes()))
    ranks.assert_only_the_last_raises(errors, SyncError)
    assert "MemoryError: full" in str(errors[1])
    monkeypatch.undo()
    assert "a worker of the engine failed" in ranks.sessions[1].state()["needs_anchor"]


def test_workers_of_processes_of_their_own_all_raise():
    group = SimpleNamespace(rank_in_group=0, world_size=2, cpu_group=None)
    with pytest.raises(SyncError, match="told"):
        Workers(group, all_raise=True).tell(SyncError("told"))
    Workers(group).tell(SyncError("told by another"))


# ---- refusals ----


def bad_messages(trainer):
    good = trainer.updates[1]
    packet = good.to_bytes()
    return {
        "duplicate": UpdateInfo(packet=trainer.updates[0].to_bytes()),
        "gap": UpdateInfo(packet=trainer.updates[2].to_bytes()),
        "another run": UpdateInfo(packet=replace(good, run_id="another").to_bytes()),
        "another seed": UpdateInfo(packet=replace(good, seed=7).to_bytes()),
        "another merge rule": UpdateInfo(packet=replace(good, weight_storage="split32").to_bytes()),
        "unknown weight": UpdateInfo(packet=replace(good, tensors={"model.x": torch.zeros(2)}).to_bytes()),
        "truncated": UpdateInfo(packet=packet[:-1]),
        "no base64": UpdateInfo(packet="!" + to_text(packet)),
        "damaged anchor": replace(anchor(trainer.weights[1], 1), seal="0" * 64),
        "anchor that is none": UpdateInfo(**anchor_info(b"no container", 1, is_last=True)),
        "anchor of another model": anchor({**trainer.weights[1], "x": torch.zeros(1)}, 1),
    }


@pytest.mark.parametrize("fault", [
    "duplicate", "gap", "another run", "another seed", "another merge rule", "unknown weight", "truncated", "no base64",
    "damaged anchor", "anchor that is none", "anchor of another model",
])  # fmt: skip
def test_what_is_wrong_changes_nothing_and_the_right_update_follows(tools, trainer, fault):
    # Catches a check after the first write, and a version that advances with a refused update.
    session = joined(tools, trainer)
    send(session, trainer.updates[0])
    with pytest.raises(PacketError):
        session.receive(bad_messages(trainer)[fault])
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[1])
    assert session.state()["version"] == 1
    send(session, trainer.updates[1])
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[2])


def test_random_damage_is_always_noticed(tools, trainer):
    session = joined(tools, trainer)
    packet = trainer.updates[0].to_bytes()
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(packet)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        if bytes(damaged) == packet:
            continue
        with pytest.raises(PacketError):
            session.receive(UpdateInfo(packet=bytes(damaged)))
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[0])
    send(session, trainer.updates[0])


def test_a_quantised_layer_is_refused_by_name(tools, trainer):
    engine = tools.build_engine(trainer.weights[0])
    engine.model.layers[0].mlp.down_proj.quant_method = type("Fp8LinearMethod", (), {})()
    session = Session(engine)
    base = replace(trainer.manifest.base, digest=None, digest_bf16=None)
    session.join(InitInfo(manifest=replace(trainer.manifest, base=base).to_json()))
    with pytest.raises(PacketError, match=r"down_proj\.weight.*quantised.*Fp8LinearMethod"):
        send(session, trainer.updates[0])


def test_an_engine_with_other_weights_follows_only_after_an_anchor(tools, trainer):
    # A fresh engine, restarted from another checkpoint or at a later version.
    session = Session(tools.build_engine(trainer.weights[1]))
    init = InitInfo(manifest=trainer.manifest.to_json())
    with pytest.raises(SyncError, match="not those of the base model"):
        session.join(init)
    with pytest.raises(SyncError, match="needs an anchor"):
        send(session, trainer.updates[0])
    assert session.state()["version"] is None
    session.receive(anchor(trainer.weights[3], 3))
    send(session, trainer.updates[3])
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[4])


def test_an_engine_that_follows_another_run_needs_an_anchor(tools, trainer):
    session = joined(tools, trainer)
    other = InitInfo(manifest=replace(trainer.manifest, run_id="another").to_json())
    with pytest.raises(SyncError, match="follows run 'a-run', not run 'another'"):
        session.join(other)
    session.receive(anchor(trainer.weights[2], 2))
    assert session.state() == {"run_id": "another", "version": 2, "needs_anchor": None, "storage": "fp32"}


def test_nothing_is_applied_before_a_run_is_announced(tools, trainer):
    with pytest.raises(SyncError, match="follows no run"):
        send(Session(tools.build_engine(trainer.weights[0])), trainer.updates[0])


def test_an_expected_version_is_a_promise(tools, trainer):
    session = joined(tools, trainer)
    send(session, trainer.updates[0])
    init = InitInfo(manifest=trainer.manifest.to_json(), expect_version=1)
    session.join(init)
    with pytest.raises(SyncError, match="at version 1, not 2"):
        session.join(replace(init, expect_version=2))
    with pytest.raises(SyncError, match="follows no run"):
        Session(tools.build_engine(trainer.weights[0])).join(init)


@pytest.mark.parametrize("fields", [{"storage": "fp16"}, {"low_plane": "disk"}])
def test_unknown_options_are_refused(trainer, fields):
    with pytest.raises(SyncError, match="allowed are"):
        InitInfo(manifest=trainer.manifest.to_json(), **fields)


@pytest.mark.parametrize("fields", [{}, {"packet": b"", "anchor": b""}, {"anchor": b""}])
def test_a_message_is_a_packet_or_an_anchor(fields):
    with pytest.raises(SyncError, match="update_info"):
        UpdateInfo(**fields)


# ---- anchors and loss ----


def halves(weights):
    names = sorted(weights)
    return {name: weights[name] for name in names[:6]}, {name: weights[name] for name in names[6:]}


def test_an_anchor_counts_when_its_last_part_is_in(tools, trainer):
    session = joined(tools, trainer)
    first, second = halves(trainer.weights[2])
    session.receive(anchor(first, 2, is_last=False))
    assert "not complete" in session.state()["needs_anchor"]
    with pytest.raises(SyncError):
        send(session, trainer.updates[2])
    session.receive(anchor(second, 2))
    assert session.state()["version"] == 2
    send(session, trainer.updates[2])
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[3])


def test_an_anchor_without_all_weights_leaves_no_version(tools, trainer):
    # Catches frozen weights that sleep dropped and the anchor does not name.
    session = joined(tools, trainer)
    with pytest.raises(SyncError, match="is missing"):
        session.receive(anchor(halves(trainer.weights[2])[0], 2))
    with pytest.raises(SyncError, match="needs an anchor"):
        session.join(InitInfo(manifest=trainer.manifest.to_json(), expect_version=2))
    session.receive(anchor(trainer.weights[2], 2))
    assert session.state()["needs_anchor"] is None


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_weights_that_something_else_wrote_are_noticed(tools, trainer, value):
    # What dropped memory looks like after it is mapped again, and what another weight transfer leaves behind.
    session = joined(tools, trainer)
    send(session, trainer.updates[0])
    for parameter in session._model.parameters():
        parameter.fill_(value)
    with pytest.raises(SyncError, match="something else wrote"):
        send(session, trainer.updates[1])
    with pytest.raises(SyncError, match="something else wrote"):
        session.join(InitInfo(manifest=trainer.manifest.to_json()))
    assert "something else wrote" in session.state()["needs_anchor"]
    session.receive(anchor(trainer.weights[2], 2))
    send(session, trainer.updates[2])
    tools.assert_same_bits(weights_of(tools, session), trainer.weights[3])


class Worker:
    """A worker of vLLM whose memory is gone while it sleeps."""

    def __init__(self, session):
        self.weight_transfer_engine = type("Backend", (), {"session": session})()
        self.calls = []

    def sleep(self, level=1):
        self.calls.append(("sleep", level))

    def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))


Worker.sleep = sleep.telling_of_sleep(Worker.sleep)
Worker.wake_up = sleep.telling_of_waking(Worker.wake_up)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_is_not_touched_and_level_two_is_a_loss(tools, trainer, monkeypatch, level):
    # Catches reads of unmapped memory, which kill a GPU engine, and the belief that level 2 keeps weights.
    session = joined(tools, trainer)
    worker = Worker(session)
    worker.sleep(level)
    monkeypatch.setattr(session_module, "witness", lambda pieces: pytest.fail("read the weights of a sleeping engine"))
    with pytest.raises(SyncError, match="sleeps"):
        send(session, trainer.updates[0])
    assert session.state()["version"] == 0
    worker.wake_up(["kv_cache"])
    with pytest.raises(SyncError, match="sleeps"):
        send(session, trainer.updates[0])
    monkeypatch.undo()
    worker.wake_up(["weights"])
    assert worker.calls == [("sleep", level), ("wake_up", ["kv_cache"]), ("wake_up", ["weights"])]
    if level == 1:
        send(session, trainer.updates[0])
        return
    with pytest.raises(SyncError, match="dropped"):
        send(session, trainer.updates[0])
    session.receive(anchor(trainer.weights[1], 1))
    send(session, trainer.updates[1])


def test_workers_without_a_session_sleep_as_before():
    worker = Worker(None)
    worker.sleep(2)
    worker.wake_up()
    assert worker.calls == [("sleep", 2), ("wake_up", None)]


def test_errors_keep_their_kind_on_the_way():
    from logra.integrations.vllm.messages import hearing_errors, telling_errors

    with pytest.raises(PacketError) as told, telling_errors():
        raise PacketError("two words (and 'quotes')")
    # As vLLM's workers and endpoints hand it on: the text inside other text, the type lost.
    with pytest.raises(PacketError, match=r"^the engine answers: two words \(and 'quotes'\)$"), hearing_errors():
        raise RuntimeError(f"Worker failed with error '{told.value}', please check the stack trace")
    with pytest.raises(RuntimeError, match=r"^something else$"), hearing_errors():
        raise RuntimeError("something else")
    assert issubclass(PacketError, LograError)
