import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_miles.cli import main
from pack_miles.contract import events
from pack_miles.contract.events import Event
from pack_miles.contract.log import Log, read_log, read_logs, runs_of, standing
from pack_miles.contract.sink import ContractSink, contract_path
from pack_miles.errors import InputError
from support.log_runs import STEPS, make_run, write_run

FINISHED = (
    b'{"completed_steps":4,"event":"run_finished","rank":0,"rollouts":2,"schema_version":1,"seconds":1.5,"step":4}'
)
FAILED = b'{"error":"killed","event":"run_failed","rank":0,"schema_version":1,"step":4}'
STARTED = (
    b'{"completed_steps":4,"configuration":{},"configuration_digest":"d","event":"run_started","expert_parallel_size":1,'
    b'"name":"n","rank":0,"resumed":true,"schema_version":1,"step":4,"time":1.0,"versions":{},"world_size":1}'
)


def write_lines(root: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path = contract_path(root, 0)
    path.write_bytes(b"\n".join(lines) + end)
    return path


def names(found: tuple[Event, ...]) -> list[str]:
    return [events.name_of(event) for event in found]


def test_whole_lines_are_read_in_order(tmp_path: Path) -> None:
    log = read_log(write_lines(tmp_path, STARTED, FINISHED))
    assert names(log.events) == ["run_started", "run_finished"]
    assert (log.problems, log.corrupt, log.rank) == ((), (), 0)


def test_a_torn_last_line_is_reported_by_number_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path, STARTED, FINISHED, FAILED[:30], end=b"")
    log = read_log(path)
    assert names(log.events) == ["run_started", "run_finished"]
    assert log.problems == (f"{path}:3: torn line of 30 bytes left out; the process was interrupted",)
    assert log.corrupt == ()


def test_a_torn_line_before_the_next_start_is_no_corruption(tmp_path: Path) -> None:
    log = read_log(write_lines(tmp_path, STARTED, FAILED[:30], STARTED, FINISHED))
    assert names(log.events) == ["run_started", "run_started", "run_finished"]
    assert len(log.problems) == 1
    assert ":2: torn" in log.problems[0]
    assert log.corrupt == ()


def test_a_whole_last_line_without_its_newline_is_read(tmp_path: Path) -> None:
    log = read_log(write_lines(tmp_path, STARTED, FINISHED, end=b""))
    assert names(log.events) == ["run_started", "run_finished"]
    assert log.problems == ()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (FAILED[:30], "truncated"),
        (b"\x00\x00\x00", "malformed"),
        (b"\xff\xfe{", "malformed"),
        (b"[1]", "Expected `object`"),
        (b"3", "Expected `object`"),
        (FAILED.replace(b"run_failed", b"run_exploded"), "run_exploded"),
        (FAILED.replace(b'"step":4', b'"step":4,"why":1'), "why"),
        (FAILED.replace(b'"schema_version":1', b'"schema_version":2'), "schema_version 2, and this reader knows 1"),
    ],
)
def test_any_other_unreadable_line_is_corrupt(tmp_path: Path, line: bytes, reason: str) -> None:
    log = read_log(write_lines(tmp_path, STARTED, line, FINISHED))
    assert names(log.events) == ["run_started", "run_finished"]
    assert log.problems == log.corrupt
    assert len(log.corrupt) == 1
    assert ":2: corrupt" in log.corrupt[0]
    assert reason in log.corrupt[0]


def test_of_many_corrupt_lines_five_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path, STARTED, *[b"damaged"] * 9, FINISHED)
    log = read_log(path)
    assert names(log.events) == ["run_started", "run_finished"]
    assert [line.split(" ")[0] for line in log.corrupt[:5]] == [f"{path}:{number}:" for number in (2, 3, 4, 5, 6)]
    assert log.corrupt[5:] == (f"{path}: 4 more corrupt lines left out",)
    assert (
        read_log(write_lines(tmp_path, STARTED, *[b"damaged"] * 6))
        .corrupt[-1]
        .endswith(": 1 more corrupt line left out")
    )


def test_a_line_of_the_wrong_type_that_is_no_json_is_corrupt(tmp_path: Path) -> None:
    log = read_log(write_lines(tmp_path, STARTED, b'"a" = 1', b"[" * 20_000, b'{"event": 3, "x', FINISHED))
    assert names(log.events) == ["run_started", "run_finished"]
    assert len(log.corrupt) == 3


STRANGERS = {
    "toml": b'schema_version = 1\nname = "demo"\n\n[model]\nformat = "small"\n',
    "gzip": gzip.compress(b'{"tokens": [1, 2]}\n' * 50, mtime=0),
    "rollouts": b'{"tokens": [1, 2, 3], "response_length": 2}\n{"tokens": [4, 5], "response_length": 1}\n',
    "binary": bytes(range(256)) * 9,
    "empty": b"",
    "blank": b"\n\n",
    "text": b"3\n",
    "torn": STARTED[:40],
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("file", ["other.file", "training_contract_rank0.jsonl"])
@pytest.mark.parametrize("command", ["report", "audit"])
def test_what_is_no_contract_file_is_the_users_mistake(
    tmp_path: Path, name: str, file: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / file
    path.write_bytes(STRANGERS[name])
    with pytest.raises(InputError, match="holds no event of a run") as caught:
        read_logs([path])
    assert str(caught.value).startswith(f"{path}: not a contract file: ")
    assert main([command, str(path)]) == 2
    assert "not a contract file" in capsys.readouterr().err


def test_the_empty_log_of_a_killed_rank_is_read_beside_the_others(tmp_path: Path) -> None:
    root = write_run(tmp_path, make_run(1))
    contract_path(root, 2).write_bytes(b"")
    assert [len(log.events) > 0 for log in read_logs([root])] == [True, True, False, True]
    contract_path(root, 2).write_bytes(b"damaged\n")
    with pytest.raises(InputError, match=r"rank2\.jsonl: not a contract file"):
        read_logs([root])


@pytest.mark.parametrize("method", ["exists", "read_bytes", "is_file"])
def test_a_file_that_must_not_be_read_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    path = write_lines(tmp_path, STARTED)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, refuse)
        with pytest.raises(InputError, match="cannot be read: Permission denied") as caught:
            read_logs([path])
    assert str(path) in str(caught.value)


def test_a_folder_that_must_not_be_listed_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(InputError, match="cannot be read: Permission denied"):
            read_logs([tmp_path])


def test_a_run_began_as_the_lowest_rank_with_a_start_says() -> None:
    made = make_run(1)
    (run,) = runs_of([Log(contract_path(Path("run"), 0), ()), Log(contract_path(Path("run"), 1), tuple(made[1]))])
    assert run.start == made[1][0]


def test_a_whole_but_unknown_last_line_is_not_taken_for_torn(tmp_path: Path) -> None:
    log = read_log(write_lines(tmp_path, STARTED, FAILED.replace(b"run_failed", b"other"), end=b""))
    assert len(log.corrupt) == 1


def test_what_is_missing_or_empty_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_logs([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"training_contract_rank\*\.jsonl"):
        read_logs([tmp_path])
    with pytest.raises(InputError, match="is not a file"):
        read_log(tmp_path / "nowhere.jsonl")


def test_an_empty_file_holds_no_event(tmp_path: Path) -> None:
    assert read_log(write_lines(tmp_path, end=b"")).events == ()


def test_directories_and_files_are_read_once_and_grouped_into_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", make_run(1, ranks=16))
    second = write_run(tmp_path / "b", make_run(1))
    logs = read_logs([first, contract_path(first, 3), contract_path(second, 1), contract_path(second, 0)])
    runs = runs_of(logs)
    assert [run.directory for run in runs] == [first, second]
    assert [log.rank for log in runs[0].logs] == list(range(16))
    assert [log.rank for log in runs[1].logs] == [0, 1]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    made = make_run(2)
    logs = read_logs([write_run(tmp_path, made)])
    assert {log.rank: list(log.events) for log in logs} == made


def test_a_resume_supersedes_the_updates_after_its_checkpoint() -> None:
    whole = make_run(3, finish=False)[0]
    resumed = make_run(4, first=1)[0]
    kept = standing([*whole, *resumed])
    before = [event for event in whole if event.update <= STEPS]
    assert kept == (*before, *resumed)
    steps = [event.step for event in kept if isinstance(event, events.Optimizer)]
    assert steps == list(range(1, 4 * STEPS + 1))


def test_a_start_from_nothing_supersedes_everything() -> None:
    again = make_run(2)[0]
    assert standing([*make_run(3, seed=5)[0], *again]) == tuple(again)


@given(cut=st.integers(1, 4000))
def test_a_file_cut_anywhere_loses_at_most_its_last_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    root = tmp_path_factory.mktemp("cut")
    own = make_run(1)[1]
    path = contract_path(write_run(root, {1: own}), 1)
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    log = read_log(path)
    assert list(log.events[:whole]) == own[:whole]
    assert len(log.events) + len(log.problems) == len([line for line in data.split(b"\n") if line])
    assert log.corrupt == ()
    with ContractSink(path, 1) as sink:
        for event in own:
            sink.write(event)
    assert list(read_log(path).events[-len(own) :]) == own
    assert read_log(path).corrupt == ()
