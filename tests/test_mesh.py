"""Meshes as a flag writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_bench.errors import MlaBenchError
from mla_bench.mesh import AXES, format_mesh, parse_mesh


@given(st.dictionaries(st.sampled_from(tuple(AXES)), st.integers(1, 9999)), st.randoms())
def test_a_mesh_is_read_in_any_order_and_written_in_one(sizes, random):
    items = [f"{axis}={size}" for axis, size in sizes.items()]
    random.shuffle(items)
    mesh = parse_mesh(" , ".join(items) or "none")
    assert mesh == tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1)
    assert parse_mesh(format_mesh(mesh) or "none") == mesh


@pytest.mark.parametrize(
    "text", ["", "cp", "cp=0", "cp=-1", "cp=2,cp=4", "pp=2", "cp=2,,tp=2", "64", "cp=1.5"]
)
def test_what_is_no_mesh_is_refused_in_one_line(text):
    with pytest.raises(MlaBenchError, match=r"^[^\n]+$"):
        parse_mesh(text)
