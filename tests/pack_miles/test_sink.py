import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pack_miles.contract import events
from pack_miles.contract.sink import ContractSink, contract_path
from support.log_runs import make_run, write_run


def finished(rank: int = 0, seconds: float = 1.5) -> events.RunFinished:
    return events.RunFinished(rank=rank, step=4, completed_steps=4, rollouts=2, seconds=seconds)


def test_an_event_is_one_line_with_sorted_keys(tmp_path: Path) -> None:
    with ContractSink(contract_path(tmp_path, 2), 2) as sink:
        sink.write(finished(rank=2))
    assert (tmp_path / "training_contract_rank2.jsonl").read_bytes() == (
        b'{"completed_steps":4,"event":"run_finished","rank":2,"rollouts":2,"schema_version":1,"seconds":1.5,"step":4}\n'
    )


def test_every_line_of_a_run_is_plain_json_with_sorted_keys(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(1))
    for path in sorted(tmp_path.iterdir()):
        for line in path.read_text().splitlines():
            fields = json.loads(line, parse_constant=pytest.fail)
            assert list(fields) == sorted(fields)
            assert {"schema_version", "rank", "event", "step"} <= set(fields)


def test_a_line_is_in_the_file_before_the_next_call(tmp_path: Path) -> None:
    with ContractSink(contract_path(tmp_path, 0), 0) as sink:
        sink.write(finished())
        assert sink.path.read_bytes().endswith(b"}\n")


def test_opening_again_appends(tmp_path: Path) -> None:
    for _ in range(2):
        with ContractSink(contract_path(tmp_path, 0), 0) as sink:
            sink.write(finished())
    assert len(contract_path(tmp_path, 0).read_text().splitlines()) == 2


def test_a_torn_last_line_is_ended_on_opening(tmp_path: Path) -> None:
    path = contract_path(tmp_path, 0)
    path.write_bytes(b'{"event":"packing","fi')
    with ContractSink(path, 0) as sink:
        sink.write(finished())
    torn, whole = path.read_text().splitlines()
    assert torn == '{"event":"packing","fi'
    assert json.loads(whole)["event"] == "run_finished"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_event_and_field(tmp_path: Path, value: float) -> None:
    with ContractSink(contract_path(tmp_path, 0), 0) as sink:
        with pytest.raises(ValueError, match=r"'run_finished', field 'seconds' is -?(nan|inf)"):
            sink.write(finished(seconds=value))
        start = msgspec.structs.replace(make_run(0, finish=False)[0][0], configuration={"miles": {"lr": [1.0, value]}})
        with pytest.raises(ValueError, match=r"'run_started', field 'configuration\.miles\.lr\[1\]'"):
            sink.write(start)
    assert contract_path(tmp_path, 0).read_bytes() == b""


def test_what_could_not_be_read_back_is_never_written(tmp_path: Path) -> None:
    with ContractSink(contract_path(tmp_path, 0), 0) as sink:
        with pytest.raises(ValueError, match=r"'run_finished'.*seconds"):
            sink.write(finished(seconds="long"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="run_finished"):
            sink.write(finished(seconds=object()))  # type: ignore[arg-type]
    assert contract_path(tmp_path, 0).read_bytes() == b""


def test_another_ranks_event_is_refused(tmp_path: Path) -> None:
    with ContractSink(contract_path(tmp_path, 0), 0) as sink, pytest.raises(ValueError, match="rank 3"):
        sink.write(finished(rank=3))


def test_the_global_structlog_configuration_is_neither_read_nor_changed(tmp_path: Path) -> None:
    structlog.configure(processors=[lambda *_: pytest.fail("the global processors were used")])
    before = structlog.get_config()
    try:
        with ContractSink(contract_path(tmp_path, 0), 0) as sink:
            sink.write(finished())
        assert structlog.get_config() == before
    finally:
        structlog.reset_defaults()
    assert contract_path(tmp_path, 0).stat().st_size > 0


def test_importing_touches_no_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", "import pack_miles.contract.sink"], cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


@given(error=st.text(), step=st.integers(0, 2**53))
def test_any_text_survives_the_way_to_the_file_and_back(
    tmp_path_factory: pytest.TempPathFactory, error: str, step: int
) -> None:
    event = events.RunFailed(rank=0, step=step, error=error)
    path = contract_path(tmp_path_factory.mktemp("log"), 0)
    with ContractSink(path, 0) as sink:
        sink.write(event)
    (line,) = path.read_bytes().splitlines()
    assert json.loads(line)["error"] == error
    assert msgspec.json.decode(line, type=events.Event) == event
