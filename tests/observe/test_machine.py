"""The checks of a machine: each verdict from what was found, each feature really tried, nothing left behind."""

import os
import resource
import sys
from pathlib import Path

import pytest

from transferqueue.lazy import install_line
from transferqueue.limits import GIB, MIB
from transferqueue.observe.machine import kernel, libraries, memory, network, runtime
from transferqueue.observe.machine.check import check_machine
from transferqueue.observe.machine.result import Check, fail, ok, tried, warn, worst
from transferqueue.transport import runtime_directory


def test_every_check_has_a_remedy_unless_it_is_ok(tmp_path: Path) -> None:
    sections = check_machine(runtime=tmp_path / "runtime")
    assert [section.title for section in sections] == ["memory", "kernel", "runtime", "network", "libraries"]
    for check in (check for section in sections for check in section.checks):
        assert bool(check.remedy) == (check.verdict != "ok"), check
        assert check.subject
        assert check.found


def test_checks_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "memory").mkdir()
    open_before = len(os.listdir("/proc/self/fd"))
    check_machine(runtime=tmp_path / "runtime", memory=tmp_path / "memory")
    assert [*(tmp_path / "runtime").iterdir(), *(tmp_path / "memory").iterdir()] == []
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_the_worst_verdict_counts() -> None:
    a, b, c = ok("a", "x"), warn("b", "x", "do"), fail("c", "x", "do")
    assert [worst([]), worst([a]), worst([a, b]), worst([b, c, a])] == ["ok", "ok", "warn", "fail"]


def test_what_a_feature_raises_becomes_its_finding() -> None:
    def attempt() -> str:
        raise PermissionError(1, "Operation not permitted")

    check = tried("pidfd", attempt, otherwise="fail", remedy="allow it")
    assert check == Check(
        subject="pidfd", verdict="fail", found="PermissionError: Operation not permitted", remedy="allow it"
    )


@pytest.mark.parametrize(
    ("free", "verdict"),
    [(10 * GIB, "ok"), (8 * GIB, "ok"), (8 * GIB - 1, "warn"), (64 * MIB, "warn"), (63 * MIB, "fail")],
)
def test_room_for_an_arena(free: int, verdict: str) -> None:
    check = memory.graded_room("", free=free, size=24 * GIB, wanted=8 * GIB)
    assert check.verdict == verdict


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    check = memory.shared_memory(GIB, tmp_path / "absent")
    assert check.verdict == "warn"
    assert check.found == f"{tmp_path}/absent is not a directory that can be written; a server will use a memfd"


def test_a_remount_remedy_can_be_pasted(tmp_path: Path) -> None:
    check = memory.shared_memory(1 << 60, tmp_path)
    assert check.verdict == "warn"
    assert check.remedy.startswith(f"mount -o remount,size=1048576T {tmp_path}; ")


def test_kernel_features_work_here(tmp_path: Path) -> None:
    """This is also the machine that runs all other tests: they need every one of them."""
    assert kernel.try_pidfd() == "the end of a process is seen at once"
    assert kernel.try_memfd().startswith("reachable through /proc")
    assert kernel.try_eventfd() == "works"
    assert kernel.try_flock(tmp_path) == f"exclusive in {tmp_path}"
    assert kernel.try_fallocate(tmp_path) == f"takes pages ahead of use in {tmp_path}"


def test_a_probe_in_a_missing_directory_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        kernel.try_remove(tmp_path / "absent")


def test_runtime_directory_that_others_may_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    check = runtime.directory(tmp_path)
    assert (check.verdict, check.remedy) == ("fail", f"chmod 0700 {tmp_path}")
    tmp_path.chmod(0o700)
    assert runtime.directory(tmp_path).verdict == "ok"


def test_runtime_directory_that_is_a_file_or_yet_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert runtime.directory(tmp_path / "file").found == f"{tmp_path}/file is not a directory"
    assert runtime.directory(tmp_path / "a" / "b").found == f"{tmp_path}/a/b will be made with mode 0700"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("variables", [{}, {"XDG_RUNTIME_DIR": "/run/user/7"}, {"TRANSFERQUEUE_RUNTIME": "/tmp/tq"}])
def test_the_runtime_directory_is_the_one_that_servers_use(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_RUNTIME_DIR", "TRANSFERQUEUE_RUNTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runtime.default_runtime() == runtime_directory()


def test_socket_path_has_a_bound() -> None:
    exact = Path("/" + "d" * (runtime.SOCKET_PATH_MAX - len("//control.sock")))
    assert runtime.socket_path(exact).verdict == "ok"
    check = runtime.socket_path(exact.with_name(exact.name + "d"))
    assert (check.verdict, check.found) == ("fail", "108 of at most 107 bytes")


@pytest.mark.parametrize(
    ("soft", "verdict"), [(64, "fail"), (256, "warn"), (1024, "ok"), (65_536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_file_limit(soft: int, verdict: str) -> None:
    assert runtime.open_files(soft).verdict == verdict


def test_versions_compare_by_their_numbers() -> None:
    assert libraries.at_least("2.10.0+cpu", "2.9")
    assert libraries.at_least("26", "26")
    assert not libraries.at_least("1.9.9", "1.10")
    assert libraries.at_least("1.0", "")


def test_requirements_are_read_as_declared() -> None:
    lines = [
        "numpy>=1.26",
        "torch>=2.5; extra == 'torch'",
        "asyncflow-transferqueue[cli,torch]; extra == 'demo'",
        'rich[jupyter] >= 13.9; extra == "cli"',
    ]
    assert [(need.name, need.least, need.extra) for need in libraries.requirements(lines)] == [
        ("numpy", "1.26", ""),
        ("torch", "2.5", "torch"),
        ("rich", "13.9", "cli"),
    ]


def test_extras_that_are_shown_are_declared() -> None:
    declared = {need.extra for need in libraries.requirements()}
    assert set(libraries.SHOWN_EXTRAS) <= declared


def test_an_extra_is_fine_absent_and_not_too_old() -> None:
    need = libraries.Requirement
    absent = libraries.extra_checks([need("no-such-library", "1", "ray")])
    assert [(check.verdict, check.found) for check in absent] == [("ok", "not installed (without no-such-library)")]
    old = libraries.extra_checks([need("numpy", "999", "torch")])
    assert (old[0].verdict, old[0].remedy) == ("warn", install_line("torch", upgrade=True))


def test_the_declared_core_is_installed_here() -> None:
    found = {check.subject: check.verdict for check in libraries.library_checks()}
    assert {"python", "numpy", "pyarrow", "pyzmq", "msgspec", "xxhash"} <= set(found)
    assert set(found.values()) == {"ok"}


def test_the_network_check_names_active_devices_and_what_a_missing_library_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    devices, _ = network.network_checks(tmp_path)
    assert (devices.verdict, devices.found) == ("ok", "mlx5_0")
    monkeypatch.setitem(sys.modules, "transferqueue.transport.bulk.carriers", None)
    (check,) = network.network_checks(tmp_path)
    assert check.verdict == "warn"
    assert "libraries" in check.remedy
