"""A value is either measured now, or recalled and said to be: never one dressed as the other."""

import json
from types import SimpleNamespace

import pytest

from scalelab.measure.recorded import RecordError, recall

VIRTUAL = SimpleNamespace(kind="virtual", why="")
LOCAL = SimpleNamespace(kind="local", why="user namespaces are off.")


def never():
    raise AssertionError("must not be measured here")


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_RECORD", "1")
    recall("speed", lambda: {"gbs": 0.12}, cluster=VIRTUAL, folder=tmp_path)
    monkeypatch.delenv("SCALELAB_RECORD")
    return tmp_path / "speed.json"


def test_live_value_is_never_labelled_recorded(record, capsys):
    before = record.read_bytes()
    result = recall("speed", lambda: 7, cluster=VIRTUAL, folder=record.parent)
    assert (result.value, result.recorded) == (7, False)
    assert capsys.readouterr().out == ""
    assert record.read_bytes() == before, "only the builder records"


def test_recalled_value_is_labelled_in_one_line(record, capsys):
    result = recall("speed", never, cluster=LOCAL, folder=record.parent)
    assert (result.value, result.recorded) == ({"gbs": 0.12}, True)
    line = capsys.readouterr().out
    kept = json.loads(record.read_text())
    assert line == (
        f"Recorded on {kept['date']} on {kept['machine']}; "
        "not run here because user namespaces are off.\n"
    )


def test_local_by_choice_says_so(record, capsys):
    recall("speed", never, cluster=SimpleNamespace(kind="local", why=""), folder=record.parent)
    assert capsys.readouterr().out.endswith("; not run here because the cluster is local.\n")


def test_failed_measurement_is_not_replaced_by_a_record(record):
    with pytest.raises(ZeroDivisionError):
        recall("speed", lambda: 1 / 0, cluster=VIRTUAL, folder=record.parent)


def test_several_kinds_can_be_enough(tmp_path):
    slurm = SimpleNamespace(kind="slurm", why="")
    result = recall("speed", lambda: 3, cluster=slurm, needs=("virtual", "slurm"), folder=tmp_path)
    assert not result.recorded
    with pytest.raises(RecordError):
        recall("speed", never, cluster=slurm, folder=tmp_path)


def test_missing_record_is_a_clear_error(tmp_path, capsys):
    with pytest.raises(RecordError) as caught:
        recall("speed", never, cluster=LOCAL, folder=tmp_path)
    assert str(caught.value) == (
        "speed.json: not recorded yet, and not run here because user namespaces are off"
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"value": 1}', '{"date": "x", "machine": "y"}', b"\xff\xfe"]
)
def test_damaged_record_is_named_in_one_line(record, text, capsys):
    record.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecordError, match=r"^speed\.json: the record is damaged \(.*\)$"):
        recall("speed", never, cluster=LOCAL, folder=record.parent)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [{1, 2}, float("nan")])
def test_value_that_json_cannot_hold_leaves_the_old_record(record, value, monkeypatch):
    before = record.read_bytes()
    monkeypatch.setenv("SCALELAB_RECORD", "1")
    with pytest.raises((TypeError, ValueError)):
        recall("speed", lambda: value, cluster=VIRTUAL, folder=record.parent)
    assert record.read_bytes() == before
    assert [p.name for p in record.parent.iterdir()] == ["speed.json"], "no part of a file left"


def test_record_names_no_host_and_no_path(record):
    import platform

    text = record.read_text()
    assert "/" not in text
    assert platform.node() not in json.loads(text)["machine"].replace(",", "").split()


@pytest.mark.parametrize("key", ["", "../x", "a/b", "a b", "a.json"])
def test_bad_key(key, tmp_path):
    with pytest.raises(ValueError, match="names a file"):
        recall(key, never, cluster=LOCAL, folder=tmp_path)


@pytest.mark.parametrize("needs", ["cloud", (), ("virtual", "cloud")])
def test_bad_needs(needs, tmp_path):
    with pytest.raises(ValueError, match="one or more of"):
        recall("speed", never, cluster=LOCAL, needs=needs, folder=tmp_path)
