"""Ray gives the same run as one process, and says what goes wrong in its workers."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.assemble import new_run, resume_run
from fedloom.config import Settings
from fedloom.core.errors import ClientFailed, InvalidConfig
from fedloom.engine.ray import ENVIRONMENT, RaySettings, _refuse_silence, workers
from fedloom.engine.run import Watcher
from fedloom.methods.base import METHODS

Content = Callable[[Path], dict[str, Any]]
Tiny = Callable[..., Settings]
RAY = ("engine=ray", "ray.workers=2")

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for all tests: a run joins the one its process is connected to, and leaves it as it is."""
    os.environ.update(ENVIRONMENT)
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
    yield
    assert ray.is_initialized()
    ray.shutdown()


EVERY_METHOD = [pytest.param(name, marks=[] if name == "perfedsde" else pytest.mark.network) for name in METHODS]


@pytest.mark.parametrize("method", EVERY_METHOD)  # but for the flagship in `make network`
def test_ray_gives_what_one_process_gives(
    method: str, cluster: None, tiny: Tiny, nobody: Watcher, content: Content, tmp_path: Path
) -> None:
    wanted = (f"method={method}", "participants=3", "hardware.gmacs=[0.01, 1]", "run.folder=somewhere")
    new_run(tiny(*wanted, "inline.threads=1"), tmp_path / "inline", nobody)
    new_run(tiny(*wanted, *RAY), tmp_path / "ray", nobody)
    one, other = (content(tmp_path / engine) for engine in ("inline", "ray"))
    assert sorted(one) == sorted(other) and len([name for name in one if name.endswith("model.safetensors")]) == 3
    for name in one:
        if name != "config.toml":
            assert one[name] == other[name], name


@pytest.mark.slow
def test_a_stopped_run_goes_on_under_ray(cluster: None, tiny: Tiny, nobody: Watcher, content: Content, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(round: int, entries: object) -> None:
        raise Stop

    watcher: Any = type("Stopping", (), {**vars(nobody), "round_done": staticmethod(stop)})
    settings = tiny("method=perfedsde", "run.folder=somewhere", *RAY)
    with pytest.raises(Stop):
        new_run(settings, tmp_path / "stopped", watcher)
    resume_run(tmp_path / "stopped", nobody)
    new_run(settings, tmp_path / "whole", nobody)
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")


class Broken:
    """A method whose clients do not answer."""

    def __init__(self, how: str) -> None:
        self.how = how

    def at(self, client: str) -> Any:
        return self

    def answer(self, instruction: Any, site: Any) -> Any:
        if self.how == "refuses":
            raise InvalidConfig("not with me", key="mine")
        if self.how == "fails":
            raise ZeroDivisionError("no data")
        import os

        os._exit(1)


@pytest.mark.parametrize(
    "how, error, said",
    [("refuses", InvalidConfig, "^not with me$"), ("fails", ClientFailed, "DivisionError: no data"), ("dies", ClientFailed, "Ray died")],
)
def test_what_goes_wrong_in_a_worker(how: str, error: type[Exception], said: str, cluster: None) -> None:
    import ray

    from fedloom.core.client_site import ClientMemory
    from fedloom.core.hardware import Hardware
    from fedloom.core.messages import TRAIN, Instruction
    from fedloom.engine.ray import RayLink

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

    class Nothing:
        def before(self, instruction: Instruction) -> tuple[ClientMemory, Hardware]:
            return ClientMemory(), Hardware()

    with workers(RaySettings(workers=1, device="cpu"), False, lambda: (Broken(how), lambda name: None)) as made:  # type: ignore[arg-type, return-value]
        link = RayLink(["client-0"], Nothing(), made)  # type: ignore[arg-type]
        with pytest.raises(error, match=said) as raised:
            link.exchange([Instruction("client-0", 0, TRAIN, 0)])
    assert how != "refuses" or raised.value.facts == {"key": "mine"}  # type: ignore[attr-defined]


def test_a_cluster_without_room_is_refused(cluster: None, tiny: Tiny, nobody: Watcher, tmp_path: Path) -> None:
    """Ray itself would wait for ever. The folder stays as it was: the same command can be given again."""
    with pytest.raises(InvalidConfig, match=r"3 workers need 3 CPUs, but the cluster has 2\. Lower ray\.workers"):
        new_run(tiny("engine=ray", "ray.workers=3"), tmp_path / "run", nobody)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_an_address_where_nothing_listens_is_refused_at_once(address: str) -> None:
    """Ray itself would try for minutes."""
    with pytest.raises(InvalidConfig, match=rf"There is no answer at ray\.address={address} .*ray start --head"):
        _refuse_silence(address)


def test_an_address_where_something_listens_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _refuse_silence(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("", "auto", "ray://127.0.0.1:1"):
        _refuse_silence(address)


def test_a_missing_ray_is_refused(tiny: Tiny, nobody: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidConfig, match=r"engine=ray needs Ray.*pip install 'fedloom\[ray\]'"):
        new_run(tiny("engine=ray"), tmp_path / "run", nobody)
    assert not (tmp_path / "run").exists()
