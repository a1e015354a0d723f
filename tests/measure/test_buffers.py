"""A TPU's figures from a hand-made HloProto, with sources that disagree or are missing."""

import sys
from types import SimpleNamespace

import pytest

from mla_bench.measure import buffers, protos
from mla_bench.measure.memory import memory_fields, read_analysis
from mla_bench.units import MIB

ANALYSIS = {
    "argument_size_in_bytes": 4 * MIB,
    "output_size_in_bytes": 2 * MIB,
    "alias_size_in_bytes": 0,
    "temp_size_in_bytes": 9 * MIB,  # fragmentation counted again
    "peak_memory_in_bytes": 10 * MIB,
}


def field(number, value):
    """A protobuf field on the wire: a whole number, or bytes."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def varint(value):
    low = bytes([value & 127 | (128 if value > 127 else 0)])
    return low + varint(value >> 7) if value > 127 else low


def allocation(size, space=0, thread_local=0):
    return field(3, field(1, 7) + field(2, size) + field(3, thread_local) + field(8, space))


@pytest.fixture
def proto(tmp_path):
    """12 MiB in HBM and 512 bytes that are thread-local, 5 MiB on chip."""
    assignment = allocation(8 * MIB) + allocation(4 * MIB) + allocation(512, 0, 1) + allocation(5 * MIB, 1)
    path = tmp_path / "jit_x.hlo_proto.pb"
    path.write_bytes(field(1, field(1, b"jit_x")) + field(3, assignment))
    return path


def fields(proto, **changed):
    analysis, _ = read_analysis(SimpleNamespace(**ANALYSIS | changed), 1)
    return memory_fields("tpu", analysis, 20 * MIB, proto)


@pytest.fixture
def viewer(monkeypatch):
    """XProf's answer, which a test may change."""
    answer = {"hbm_peak": 10 * MIB, "onchip_peak": 5 * MIB, "total": 12 * MIB}

    def memory_view(_, space):
        peak = answer["onchip_peak" if space else "hbm_peak"]
        return buffers.MemoryView(answer["total"], peak, (), (), 0)

    monkeypatch.setattr(buffers, "memory_view", memory_view)
    return answer


def test_the_total_is_the_allocations_in_hbm_and_not_the_sum(proto, viewer):
    found, remark = fields(proto)
    assert found["hbm_total_bytes"] == 12 * MIB + 512
    assert found["hbm_temp_bytes"] == 6 * MIB + 512
    assert found["hbm_fragmentation_bytes"] == 2 * MIB + 512
    assert found["onchip_peak_bytes"] == 5 * MIB
    assert found["fits"] is True
    assert not remark


def test_sources_that_disagree_are_named(proto, viewer):
    viewer["total"] = 11 * MIB
    _, remark = fields(proto, total_allocation_bytes=13 * MIB, peak_memory_in_bytes=13 * MIB)
    assert f"XProf's total is {11 * MIB} bytes" in remark
    assert f"total_allocation_bytes is {13 * MIB}" in remark
    assert "peak_memory_in_bytes is 3.0 MiB over the live peak in HBM" in remark


def test_no_more_is_on_chip_than_what_is_reserved_there(proto, viewer):
    viewer["onchip_peak"] = 9 * MIB
    found, remark = fields(proto)
    assert found["onchip_peak_bytes"] == 5 * MIB
    assert "XProf counts 9.0 MiB on chip where 5.0 are reserved" in remark


def test_without_xprof_the_total_stands_and_the_rest_is_blank(proto, monkeypatch):
    monkeypatch.setitem(sys.modules, "xprof.convert", None)
    found, remark = fields(proto)
    assert found["hbm_total_bytes"] == 12 * MIB + 512
    assert "hbm_live_peak_bytes" not in found
    assert "xprof is not installed" in remark


@pytest.mark.parametrize("missing", ["proto", "protobuf"])
def test_without_a_buffer_assignment_the_usual_sum_is_never_the_total(missing, proto, monkeypatch):
    if missing == "protobuf":
        monkeypatch.setitem(sys.modules, "google.protobuf", None)
        protos.message_class.cache_clear()
    path = proto if missing == "protobuf" else None
    found, remark = fields(path)
    assert found["hbm_total_bytes"] is None
    assert found["fits"] is None
    assert "buffer assignment" in remark
    found, _ = fields(path, total_allocation_bytes=12 * MIB)
    assert found["hbm_total_bytes"] == 12 * MIB
    assert "total_allocation_bytes" in found["hbm_source"]


def test_the_module_is_chosen_by_name_and_not_by_size(tmp_path):
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "module_1.jit_helper.x.after_optimizations.hlo.pb").write_bytes(b"large" * 100)
    (dump / "module_2.jit_x.x.after_optimizations.hlo.pb").write_bytes(b"mine")
    kept = buffers.find_proto(dump, "jit_x")
    assert kept is not None
    assert kept.read_bytes() == b"mine"
    assert kept.name == "jit_x.hlo_proto.pb"
    assert buffers.find_proto(dump, "jit_y") is None


def test_a_module_is_renamed_and_all_else_stays(tmp_path):
    module = field(1, b"jit_a") + field(2, b"entry") + field(5, 7)
    renamed = buffers.rename_module(field(1, module) + field(3, allocation(MIB)), "jit_b")
    assert b"jit_b" in renamed
    assert b"jit_a" not in renamed
    (tmp_path / "x").write_bytes(renamed)
    assert [found.size for found in buffers.allocations(tmp_path / "x")] == [MIB]
    assert b"entry" in renamed
    assert field(5, 7) in renamed
