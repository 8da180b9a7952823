"""Which devices a process would use, and what people are told of who holds one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from registry import provenance
from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks import devices as devices_module
from tasks.device_slots import leases
from tasks.devices import HELD, devices, held_by_parent, holder_text, limit_name, lock_file, visible
from tasks.engines.subprocesses import identity

ALIKE = """\
GPU 0: NVIDIA H200 (UUID: GPU-bbbb1111-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-aaaa2222-0000-0000-0000-000000000000)
"""
UNLIKE = ALIKE.replace("GPU 1: NVIDIA H200", "GPU 1: NVIDIA L4")
DIVIDED = """\
GPU 0: NVIDIA H200 (UUID: GPU-bbbb1111-0000-0000-0000-000000000000)
  MIG 3g.71gb     Device  0: (UUID: MIG-cccc3333-0000-0000-0000-000000000000)
  MIG 1g.18gb     Device  1: (UUID: MIG-dddd4444-0000-0000-0000-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-aaaa2222-0000-0000-0000-000000000000)
"""
A, B, C, D = (
    f"{name}-0000-0000-0000-000000000000"
    for name in ("GPU-aaaa2222", "GPU-bbbb1111", "MIG-cccc3333", "MIG-dddd4444")
)


@pytest.mark.parametrize(
    ("listing", "named", "order", "found"),
    [
        ("", None, None, ()),
        ("", "0", None, ()),
        (ALIKE, None, None, (A, B)),
        (ALIKE, "", None, ()),
        (ALIKE, "-1", None, ()),
        (ALIKE, "0", None, (B,)),
        (ALIKE, "1, 0", None, (A, B)),
        (ALIKE, "1,7,0", None, (A,)),  # CUDA stops at the first wrong one
        (ALIKE, "GPU-aaaa", None, (A,)),
        (ALIKE, "GPU-ffff", None, ()),
        (UNLIKE, "0", None, (A, B)),  # 0 is the fastest, whichever that is
        (UNLIKE, "0", "PCI_BUS_ID", (B,)),
        (UNLIKE, "GPU-bbbb", None, (B,)),
        (DIVIDED, None, None, (A, C, D)),
        (DIVIDED, "0", None, (C, D)),
        (DIVIDED, D, None, (D,)),
        (DIVIDED, f"{C},1", None, (A, C)),
    ],
)
def test_visible_devices(
    listing: str, named: str | None, order: str | None, found: tuple[str, ...]
) -> None:
    assert visible(listing, named, order) == found


def test_without_a_gpu_the_machine_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices() == ("cpu",)


def test_every_user_finds_the_same_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock_file("cpu") == tmp_path / "pilotage-cpu.lock"
    monkeypatch.setenv("PILOTAGE_DEVICE_LOCKS", "")
    settings.cache_clear()
    place = lock_file("cpu").parent
    assert str(place) in ("/run/lock", "/tmp") and place.stat().st_mode & 0o002
    monkeypatch.setenv("PILOTAGE_DEVICE_LOCKS", str(tmp_path / "none"))
    settings.cache_clear()
    with pytest.raises(UserError, match=r"PILOTAGE_DEVICE_LOCKS=.*none: no such folder"):
        lock_file("cpu")


def test_who_holds_it_is_told() -> None:
    since = "2026-11-30T14:05:00+00:00"
    record = {"pid": 12, "user": "mia", "what": "latency bf16", "since": since}
    assert holder_text(record) == f"process 12 of mia (latency bf16, since {since})"
    assert holder_text({}) == "a process that left no record"


def test_only_a_live_ancestor_holds_for_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, me = identity(os.getppid()), identity(os.getpid())
    assert parent is not None and me is not None
    monkeypatch.setenv(HELD, f"{parent['pid']}:{parent['start']}:cpu")
    assert held_by_parent(["cpu"])
    assert not held_by_parent(["cpu", "GPU-1"]), "it holds another device"
    monkeypatch.setenv(HELD, f"{parent['pid']}:{parent['start'] + 1}:cpu")
    assert not held_by_parent(["cpu"]), "its process id was given away"
    monkeypatch.setenv(HELD, f"{me['pid']}:{me['start']}:cpu")
    assert not held_by_parent(["cpu"]), "it is nobody's child"
    monkeypatch.setenv(HELD, "nonsense")
    assert not held_by_parent(["cpu"])


def test_the_limit_names_host_and_device() -> None:
    name = limit_name("GPU-1")
    assert name.startswith("pilotage-") and name.endswith("-GPU-1") and " " not in name


@pytest.fixture
def broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An `nvidia-smi` that fails as after an upgrade of the driver; the folder of its GPUs."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho Failed to initialize NVML: version mismatch\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "DEVICE_FILES", tmp_path)
    caches = (devices_module._listing, provenance.hardware)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_a_gpu_that_does_not_answer_is_not_taken_for_none(broken_driver: Path) -> None:
    """Its run would lock the CPU, work beside the GPU's holder, and make all anew as on a CPU."""
    (broken_driver / "nvidia0").touch()
    for ask in (devices, provenance.hardware):
        with pytest.raises(InfrastructureError, match=r"nvidia0 is there: Failed to initialize"):
            ask()


def test_a_driver_without_a_gpu_is_no_fault(broken_driver: Path) -> None:
    assert devices() == ("cpu",)
    assert provenance.hardware()["gpus"] == []


def test_only_leases_are_given_back() -> None:
    lease = "0f8fad5b-d9cb-469f-a165-70867728950e"
    assert leases(["", "x", lease, lease]) == [UUID(lease)]
