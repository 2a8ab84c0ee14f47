import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pack_core import Sample
from pack_miles.errors import InputError
from pack_miles.faults import RULES
from pack_miles.samples import NO_LIMITS, RolloutRow, RowLimits, read_rows, to_samples, write_rows
from support.miles_rows import routes, row, write_jsonl


def refusal(path: Path, limits: RowLimits = NO_LIMITS) -> str:
    with pytest.raises(InputError) as caught:
        list(read_rows(path, limits))
    return str(caught.value)


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.jsonl.gz"])
def test_rows_are_read_in_order_with_the_field_names_of_miles(tmp_path: Path, name: str) -> None:
    path = write_jsonl(
        tmp_path / name,
        [
            row(
                4,
                2,
                loss_mask=[1, 0],
                rollout_log_probs=[-0.5, -1],
                rollout_routed_experts=routes(4),
                reward=1,
                index=7,
                group_index=3,
                weight_versions=["2"],
                prompt="not needed",
            ),
            row(3, 0, index=8, group_index=3, reward=None),
        ],
    )

    first, second = read_rows(path)

    assert first.tokens == [0, 1, 2, 3]
    assert (first.response_length, first.loss_mask, first.rollout_log_probs) == (2, [1, 0], [-0.5, -1.0])
    assert first.rollout_routed_experts == [[[1, 2]] * 3] * 3
    assert (first.reward, first.index, first.group_index, first.weight_versions) == (1.0, 7, 3, ["2"])
    assert (second.response_length, second.loss_mask, second.reward) == (0, None, None)


def test_gzip_is_recognized_by_content_not_by_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.gz", [row(2, 1)]).rename(tmp_path / "a.jsonl")

    assert len(list(read_rows(path))) == 1


def test_a_sample_is_known_by_its_index_or_else_its_line(tmp_path: Path) -> None:
    indexed = write_jsonl(tmp_path / "a", [row(4, 2, index=7, group_index=3), row(6, 2, index="q/1", group_index="q")])
    plain = write_jsonl(tmp_path / "b", [row(4, 2), row(6, 2)])

    assert to_samples(read_rows(indexed)) == [Sample(id=7, length=4, group=3), Sample(id="q/1", length=6, group="q")]
    assert to_samples(read_rows(plain)) == [Sample(id=1, length=4), Sample(id=2, length=6)]


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", [row(4, 2), "broken"])

    assert next(iter(read_rows(path))).response_length == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row(5, 5), "the sample of line 2 has response_length 5, but it must be at least 0 and below its 5 tokens"),
        (row(5, 6), "the sample of line 2 has response_length 6"),
        (row(5, -1), "the sample of line 2 has response_length -1"),
        (row(0, 0), "the sample of line 2 has response_length 0, but it must be at least 0 and below its 0 tokens"),
        (row(5, 2, loss_mask=[1]), "the sample of line 2 has 1 value of loss_mask but response_length 2"),
        (row(5, 2, loss_mask=[1, 2]), "the sample of line 2 has loss_mask[1] = 2; a mask holds only 0 and 1"),
        (
            row(5, 2, loss_mask=[True, True]),
            "the sample of line 2 has loss_mask[0] = true; loss_mask must be 0 or 1 for each response token",
        ),
        (
            row(5, 2, rollout_log_probs=[-1.0] * 3),
            "the sample of line 2 has 3 values of rollout_log_probs but response_length 2",
        ),
        (
            row(5, 2, rollout_log_probs=[-1.0, math.nan]),
            "line 2 has rollout_log_probs[1] = NaN; numbers must be finite",
        ),
        (row(5, 2, rollout_log_probs=[-1.0, -math.inf]), "rollout_log_probs[1] = -Infinity; numbers must be finite"),
        (row(5, 2, metadata={"a": [0, {"b": math.inf}]}), "line 2 has metadata.a[1].b = Infinity; numbers must be"),
        (
            '{"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-1e999]}',
            "has rollout_log_probs[0] = -Infinity; numbers must be finite",
        ),
        (row(5, 2, reward={"accuracy": 1.0}), 'has reward = {"accuracy": 1.0}; reward must be a number, or null'),
        (row(5, 2, rollout_routed_experts=routes(6)), "the sample of line 2 has routes of 5 tokens but needs 4"),
        (row(5, 2, rollout_routed_experts=routes(4)), "the sample of line 2 has routes of 3 tokens but needs 4"),
        (
            row(3, 2, rollout_routed_experts=[[[1, 2]], []]),
            "the sample of line 2 has routes of 0 layers at row 1, expected 1",
        ),
        (
            row(3, 2, rollout_routed_experts=[[[1], [1]], [[1], [1, 2]]]),
            "the sample of line 2 has 2 experts at row 1, layer 1, expected 1",
        ),
        (row(3, 2, rollout_routed_experts=[[], []]), "the sample of line 2 has routes of 0 layers"),
        (
            row(3, 2, rollout_routed_experts=[[[]], [[]]]),
            "the sample of line 2 has routes of 1 layer and 0 experts a token",
        ),
        (
            row(3, 2, rollout_routed_experts=[[1], [1]]),
            "has rollout_routed_experts[0][0] = 1; rollout_routed_experts must be expert ids",
        ),
        (
            row(3, 2, rollout_routed_experts=[[[0.5]], [[1]]]),
            "has rollout_routed_experts[0][0][0] = 0.5; rollout_routed_experts must be expert ids",
        ),
        ({"tokens": [1, 2]}, "the sample of line 2 has no response_length; it must be a whole number, how many"),
        ({"response_length": 1, "index": 4}, "sample 4 has no tokens; it must be token ids"),
        (
            {"tokens": [1, "2"], "response_length": 1, "index": "q/2"},
            "sample 'q/2' has tokens[1] = \"2\"; tokens must be token ids, whole numbers from 0",
        ),
        (
            {"tokens": [1, -2], "response_length": 1},
            "line 2 has tokens[1] = -2; tokens must be token ids, whole numbers from 0",
        ),
        ([1, 2], "the line holds a list; a rollouts file has one JSON object a line"),
        ({"tokens": [1, 2**63], "response_length": 1}, "has tokens[1] = 9223372036854775808; token ids are whole"),
        (row(5, 2, index=[1]), "the sample of line 2 has index = [1]; index must be a whole number or a text"),
        (row(5, 2, rollout_log_probs=[-1.0, 0.01]), "has rollout_log_probs[1] = 0.01; the logarithm of a probability"),
        (row(5, 2, loss_maks=[1, 1]), "line 2 has an unknown field 'loss_maks'; did you mean 'loss_mask'? rename it"),
        ({"tokens": [1, 2], "response_lenght": 1, "index": 3}, "sample 3 has an unknown field 'response_lenght'; did"),
        ("", "the line is blank"),
        ("   ", "the line is blank"),
        ("{'tokens': [1]}", "2: not valid JSON: object keys must be strings (byte 1); write one JSON object a line"),
        ('{"tokens": [1, 2], "response_length": 1} x', "not valid JSON"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_sample_and_limit(tmp_path: Path, bad: Any, words: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row(5, 2), bad, row(5, 2)])

    message = refusal(path)

    assert message.startswith(f"{path}:2: ")
    assert words in message


def test_the_message_names_the_index_of_a_sample_that_has_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row(5, 2, index="q17/3", loss_mask=[1])])

    assert refusal(path) == (
        f"{path}:1: sample 'q17/3' has 1 value of loss_mask but response_length 2; give one for each response token"
    )


def test_a_sample_over_the_limit_is_named_with_both_numbers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row(6144, 2, index=1), row(8112, 2, index=2)])

    assert refusal(path, RowLimits(max_length=6144)).startswith(
        f"{path}:2: sample 2 has 8,112 tokens but max_sequence_length is 6,144;"
    )
    assert len(list(read_rows(path, RowLimits(max_length=8112)))) == 2


def test_two_samples_of_one_index_are_refused_with_both_lines(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row(5, 2, index=4), row(5, 2, index=5), row(5, 2, index=4)])

    assert refusal(path).startswith(f"{path}:3: index 4 is also that of line 1;")


@pytest.mark.parametrize("field", ["index", "group_index"])
@pytest.mark.parametrize(("first", "second", "words"), [(1, None, "has no"), (None, 1, "has an")])
def test_an_identity_on_some_lines_only_is_refused(
    tmp_path: Path, field: str, first: int | None, second: int | None, words: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row(5, 2, **{field: first}), row(5, 2, **{field: second})])

    message = refusal(path)

    assert message.startswith(f"{path}:2: ")
    assert f"{words} {field} but line 1" in message


def test_routes_must_keep_to_the_model_of_the_configuration(tmp_path: Path) -> None:
    limits = RowLimits(layers=3, top_k=2, experts=8, moe_layers=(1, 2))
    outside = routes(4)
    outside[2][1][0] = 8
    dense = routes(4)
    dense[2][0] = [99, 99]

    twice = routes(4)
    twice[1][2] = [5, 5]
    assert "is routed to [5, 5] at row 1, layer 2, an expert twice; a token goes to different experts" in refusal(
        write_jsonl(tmp_path / "d", [row(4, 2, rollout_routed_experts=twice)]), limits
    )
    assert len(list(read_rows(write_jsonl(tmp_path / "ok", [row(4, 2, rollout_routed_experts=dense)]), limits))) == 1
    assert "the sample of line 1 is routed to expert 8 at row 2, layer 1, but the model has experts 0 to 7" in refusal(
        write_jsonl(tmp_path / "a", [row(4, 2, rollout_routed_experts=outside)]), limits
    )
    assert "routes of 2 layers at row 0, expected 3" in refusal(
        write_jsonl(tmp_path / "b", [row(4, 2, rollout_routed_experts=routes(4, layers=2))]), limits
    )
    assert "3 experts at row 0, layer 0, expected 2" in refusal(
        write_jsonl(tmp_path / "c", [row(4, 2, rollout_routed_experts=routes(4, top_k=3))]), limits
    )


def test_routes_of_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    rows = [row(4, 2, rollout_routed_experts=routes(4, layers=layers)) for layers in (3, 2)]

    assert "the sample of line 2 has routes of 2 layers and top-2, the lines before have 3 and top-2" in refusal(
        write_jsonl(tmp_path / "a", rows)
    )


def test_token_ids_are_held_to_a_vocabulary(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", [{"tokens": [3, 12], "response_length": 1}])

    assert "has tokens[1] = 12; the model of the run has token ids 0 to 11" in refusal(path, RowLimits(vocabulary=12))
    assert len(list(read_rows(path, RowLimits(vocabulary=13)))) == 1


def test_a_log_probability_may_be_above_0_by_rounding_only(tmp_path: Path) -> None:
    close = write_jsonl(tmp_path / "a", [row(4, 2, rollout_log_probs=[0.0, 5e-7])])

    assert len(list(read_rows(close))) == 1
    assert "the logarithm of a probability is at most 0" in refusal(
        write_jsonl(tmp_path / "b", [row(4, 2, rollout_log_probs=[0.0, 5e-6])])
    )


def test_other_fields_of_miles_are_no_misspelt_ones(tmp_path: Path) -> None:
    others = ["prompt", "response", "label", "status", "metadata", "train_metadata", "rollout_id", "teacher_log_probs"]
    others += ["opd_reverse_kl", "rollout_indexer_topk", "remove_sample", "routing_key", "spec_info", "adapter"]
    others += ["session_id", "prefix_cache_info", "multimodal_inputs", "multimodal_train_inputs", "rewards"]

    path = write_jsonl(tmp_path / "a", [row(4, 2, reward=1.0) | dict.fromkeys(others, 0)])

    assert len(list(read_rows(path))) == 1


def test_every_field_of_a_row_says_what_it_must_be() -> None:
    assert set(RULES) == set(RolloutRow.__struct_fields__)


def test_broken_json_in_a_gzip_file_may_be_damage(tmp_path: Path) -> None:
    message = refusal(write_jsonl(tmp_path / "a.gz", ["{x}"]))

    assert message.endswith("write one JSON object a line, or the file is damaged; copy it again")
    assert message.count("JSON is malformed") == 0


def test_a_missing_an_empty_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))

    assert "no such file" in refusal(tmp_path / "none")
    assert "the file is empty" in refusal(tmp_path / "empty")
    assert "the file is empty" in refusal(tmp_path / "empty.gz")
    assert "cannot be read" in refusal(tmp_path)


def test_a_file_cut_inside_its_last_line_is_said_to_be_truncated(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", [row(5, 2), row(5, 2)])
    path.write_bytes(path.read_bytes()[:-9])

    message = refusal(path)

    assert message.startswith(f"{path}:2: not valid JSON")
    assert "may be truncated" in message


@pytest.mark.parametrize("kept", [5, 12, 100, -1, -9])
def test_a_cut_gzip_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_jsonl(tmp_path / "a.gz", [row(50, 20, index=n) for n in range(500)])
    path.write_bytes(path.read_bytes()[:kept])

    assert "the gzip file is truncated or damaged" in refusal(path)


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.gz", [row(50, 20, index=n) for n in range(500)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)

    message = refusal(path)

    assert str(path) in message


def test_a_last_line_without_a_newline_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(json.dumps(row(5, 2)))

    assert len(list(read_rows(path))) == 1


@st.composite
def rollout_rows(draw: st.DrawFn) -> list[RolloutRow]:
    rows = []
    for index in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 9))
        response = draw(st.integers(0, length - 1))
        rows.append(
            RolloutRow(
                tokens=draw(st.lists(st.integers(0, 200_000), min_size=length, max_size=length)),
                response_length=response,
                loss_mask=draw(st.none() | st.lists(st.integers(0, 1), min_size=response, max_size=response)),
                rollout_log_probs=draw(st.none() | st.lists(st.floats(-50, 0), min_size=response, max_size=response)),
                rollout_routed_experts=draw(st.none() | st.just(routes(length))),
                reward=draw(st.none() | st.floats(-10, 10)),
                index=index,
                group_index=index // 2,
                weight_versions=draw(st.none() | st.lists(st.just("3"), max_size=2)),
            )
        )
    return rows


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rollout_rows(), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_what_is_written_is_read_back_exactly(tmp_path: Path, rows: list[RolloutRow], suffix: str) -> None:
    path = tmp_path / f"a{suffix}"

    write_rows(path, rows)

    assert list(read_rows(path)) == rows
    data = gzip.decompress(path.read_bytes()) if suffix.endswith(".gz") else path.read_bytes()
    assert [json.loads(line)["tokens"] for line in data.splitlines()] == [one.tokens for one in rows]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), zipped=st.booleans())
def test_a_damaged_file_is_read_or_refused_and_never_breaks_the_reader(
    tmp_path: Path, data: st.DataObject, zipped: bool
) -> None:
    rows = [row(4, 2, index=n, rollout_log_probs=[-1.0, -0.5], rollout_routed_experts=routes(4)) for n in range(3)]
    path = write_jsonl(tmp_path / ("a.gz" if zipped else "a"), rows)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])

    told = str(path)
    try:
        list(read_rows(path))
    except InputError as error:
        told = str(error)

    assert told.startswith(str(path))


def test_deep_nesting_does_not_break_the_reader(tmp_path: Path) -> None:
    deep = '{"tokens": [1, 2], "response_length": 1, "extra": ' + "[" * 100_000 + "]" * 100_000 + "}"

    assert "not valid JSON" in refusal(write_jsonl(tmp_path / "a", [deep]))


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [RolloutRow(tokens=[1, 2], response_length=1)]

    write_rows(tmp_path / "a.gz", rows)
    write_rows(tmp_path / "b.gz", rows)

    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize(
    "bad",
    [
        RolloutRow(tokens=[1, 2], response_length=1, rollout_log_probs=[math.nan]),
        RolloutRow(tokens=[1, 2], response_length=1, reward=math.inf),
        RolloutRow(tokens=[1, 2], response_length=1, loss_mask=[]),
    ],
)
def test_a_bad_row_is_not_written_and_nothing_is_left(tmp_path: Path, bad: RolloutRow) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl:2: the sample of line 2"):
        write_rows(tmp_path / "a.jsonl", [RolloutRow(tokens=[1, 2], response_length=1), bad])

    assert list(tmp_path.iterdir()) == []


def test_writing_makes_the_folder_and_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    good = [RolloutRow(tokens=[1, 2], response_length=1)]
    write_rows(path, good)

    with pytest.raises(InputError):
        write_rows(path, [RolloutRow(tokens=[1], response_length=1)])

    assert list(read_rows(path)) == good
