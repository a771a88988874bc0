"""An engine is kept on the version of an optimizer, through whatever happens to it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from logra.errors import SyncError
from logra.integrations.vllm.client import Delivery, EngineClient, NoAnswerError
from logra.integrations.vllm.follower import Follower
from logra.integrations.vllm.messages import InitInfo, UpdateInfo, telling_errors
from logra.integrations.vllm.session import Session
from logra.sync import DirectoryLog


class Direct:
    """The way to a session in this process, with a record of what went over it."""

    def __init__(self, model):
        self.session = Session(model)
        self.name = None
        self.sent = []
        self.is_down = False

    def init(self, info):
        if self.is_down:
            raise NoAnswerError("down")
        with telling_errors():
            self.session.join(InitInfo(**info))

    def update(self, infos, version_name):
        for info in infos:
            self.sent.append("anchor" if "anchor" in info else "packet")
            with telling_errors():
                self.session.receive(UpdateInfo(**info))
        self.name = version_name

    def version_name(self):
        return self.name

    def take_over(self, version_name):
        self.name = version_name


class Client(EngineClient):
    def __init__(self, model):
        super().__init__()
        self.way = Direct(model)

    @property
    def transport(self):
        return self.way


class Optimizer:
    """A `PolicyOptimizer` that takes the steps of a recorded run."""

    def __init__(self, trainer, version=0):
        self.trainer = trainer
        self.model = nn.Module()
        self.targets, self.state = (), {}
        self.config = SimpleNamespace(weight_storage=trainer.storage, seed=0)
        for name, value in trainer.weights[version].items():
            *path, last = name.split(".")
            module = self.model
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(value.clone()))
        self.version = version

    def step(self):
        update = self.trainer.updates[self.version]
        self.version += 1
        with torch.no_grad():
            for name, value in self.trainer.weights[self.version].items():
                self.model.get_parameter(name).copy_(value)
        return update


def weights_of(tools, client):
    return tools.assemble([client.way.session._replica.layout])


@pytest.fixture
def client(tools, trainer) -> Client:
    return Client(tools.build_engine(trainer.weights[0]))


def test_updates_are_sent_as_they_come(tools, trainer, client):
    optimizer = Optimizer(trainer)
    follower = Follower(client, optimizer)
    assert follower.sync() == Delivery(0, 0, 0.0)
    update = optimizer.step()
    follower.add(update)
    delivery = follower.sync()
    assert delivery.version == 1
    assert delivery.num_bytes > 0
    follower.add(None)  # a skipped step
    assert follower.sync().num_bytes == 0
    for _ in range(2):  # two steps between two generations
        follower.add(optimizer.step())
    assert follower.sync().version == 3
    assert client.way.sent == ["packet"] * 3
    assert follower.num_anchors == 0
    tools.assert_same_bits(weights_of(tools, client), trainer.weights[3])


def test_an_engine_that_begins_from_other_weights_gets_an_anchor(tools, trainer, client, caplog):
    # A trainer that resumes at version 2: the engine has the base model.
    optimizer = Optimizer(trainer, version=2)
    follower = Follower(client, optimizer)
    follower.sync()
    assert follower.num_anchors == 1
    assert "full weights" in caplog.text
    follower.add(optimizer.step())
    follower.sync()
    assert client.way.sent == ["anchor", "packet"]
    tools.assert_same_bits(weights_of(tools, client), trainer.weights[3])


def test_a_restarted_engine_catches_up_from_the_log_without_an_anchor(tools, trainer, tmp_path):
    log = DirectoryLog(tmp_path, trainer.manifest)
    client, optimizer = Client(tools.build_engine(trainer.weights[0])), Optimizer(trainer)
    follower = Follower(client, optimizer, log)
    for _ in range(3):
        follower.add(log_and_return(log, optimizer.step()))
        follower.sync()
    client.way = Direct(tools.build_engine(trainer.weights[0]))
    follower.add(log_and_return(log, optimizer.step()))
    follower.sync()
    assert client.way.sent[-4:] == ["packet"] * 4
    assert follower.num_anchors == 0
    tools.assert_same_bits(weights_of(tools, client), trainer.weights[4])


def log_and_return(log, update):
    log.append(update)
    return update


def test_a_restarted_engine_without_a_log_gets_an_anchor(tools, trainer, client):
    optimizer = Optimizer(trainer)
    follower = Follower(client, optimizer)
    follower.add(optimizer.step())
    follower.sync()
    client.way = Direct(tools.build_engine(trainer.weights[0]))
    follower.sync()
    assert client.way.sent == ["anchor"]
    tools.assert_same_bits(weights_of(tools, client), trainer.weights[1])


def test_lost_weights_get_an_anchor_before_the_next_sample(tools, trainer, client):
    # Catches a synchronisation that does nothing when there is no update, though the engine has forgotten everything.
    optimizer = Optimizer(trainer)
    follower = Follower(client, optimizer)
    follower.add(optimizer.step())
    follower.sync()
    for parameter in client.way.session._model.parameters():
        parameter.zero_()
    follower.sync()
    assert follower.num_anchors == 1
    tools.assert_same_bits(weights_of(tools, client), trainer.weights[1])


def test_an_engine_that_cannot_hold_the_weights_is_an_error(tools, trainer, client, monkeypatch):
    optimizer = Optimizer(trainer)
    follower = Follower(client, optimizer)
    follower.sync()
    optimizer.step()  # not announced: the engine cannot know
    monkeypatch.setattr(client, "load", lambda *_: (_ for _ in ()).throw(SyncError("no room")))
    with pytest.raises(SyncError, match="does not take over the weights: no room"):
        follower.sync()


def test_an_engine_that_does_not_answer_is_an_error_and_not_a_reason_for_an_anchor(trainer, client):
    follower = Follower(client, Optimizer(trainer))
    client.way.is_down = True
    with pytest.raises(NoAnswerError):
        follower.sync()
    assert follower.num_anchors == 0


def test_some_updates_carry_the_digest_of_all_weights(tools, trainer, client, monkeypatch):
    # The engine compares it; without it, weights that differ by a bit would stay unnoticed.
    monkeypatch.setattr("logra.integrations.vllm.follower.DIGEST_EVERY", 1)
    optimizer = Optimizer(trainer)
    follower = Follower(client, optimizer)
    pushed = []
    monkeypatch.setattr(client, "push", lambda update, push=client.push: (pushed.append(update), push(update))[1])
    follower.add(optimizer.step())
    follower.sync()
    assert pushed[0].weights_digest is not None


def test_a_log_or_an_update_of_another_merge_rule_is_refused(trainers, client, tmp_path):
    # Catches updates that are sent under the rule of the manifest, not under the one that they were trained by.
    log = DirectoryLog(tmp_path, replace(trainers["split32"].manifest, seed=0))
    with pytest.raises(SyncError, match=r"optimizer's weight_storage is 'split24', the log's is 'split32'"):
        Follower(client, Optimizer(trainers["split24"]), log)
    optimizer = Optimizer(trainers["split32"])
    follower = Follower(client, optimizer, log)
    update = optimizer.step()
    with pytest.raises(SyncError, match=r"update to version 1: weight_storage is 'split24', the log's is 'split32'"):
        follower.add(replace(update, weight_storage="split24"))
    with pytest.raises(SyncError, match=r"update to version 1: seed is 1, the log's is 0"):
        follower.add(replace(update, seed=1))
