"""Every mesh of 8 devices over data, fsdp and tensor computes what one device computes: loss, every gradient, five
steps."""

import pytest

MESHES = [
    {"data": data, "fsdp": fsdp, "tensor": 8 // (data * fsdp)}
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    if data * fsdp <= 8
]
LAYOUTS = [
    mesh | {"sequence_parallel": split} for mesh in MESHES for split in (False, True) if mesh["tensor"] > 1 or not split
]


def name_of(layout: dict) -> str:
    sizes = "-".join(f"{axis}{size}" for axis, size in layout.items() if axis != "sequence_parallel" and size > 1)
    return sizes + ("-sequence" if layout["sequence_parallel"] else "")


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_layout_equals_one_device(model, layout, reference, layout_run, assert_same):
    assert_same(layout_run(model, layout), reference(model))


@pytest.mark.parametrize(
    "sections",
    [{"remat": {"policy": "full"}}, {"remat": {"policy": "dots"}}, {"kernels": {"unroll_layers": True}}],
    ids=["full", "dots", "unrolled"],
)
def test_recomputation_and_unrolling_change_nothing(sections, reference, layout_run, assert_same):
    layout = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}
    assert_same(layout_run("llama", layout, **sections), reference("llama"))


def test_shared_heads_caps_windows_and_tiles_change_nothing(reference, layout_run, assert_same):
    """One key/value head for four devices, and attention in tiles against the one-device run's full scores."""
    layout = {"fsdp": 2, "tensor": 4, "sequence_parallel": True}
    tiles = {"attention": "blockwise", "attention_block": 6}
    assert_same(layout_run("gemma", layout, kernels=tiles, remat={"policy": "dots"}), reference("gemma"))


def test_one_stretch_of_text_changes_nothing(reference, layout_run, assert_same):
    layout = {"fsdp": 4, "tensor": 2, "sequence_parallel": True}
    data = {"sequence_length": 16, "document_boundaries": "ignore"}
    found = layout_run("gpt2", layout, data=data, kernels={"unroll_layers": True}, remat={"policy": "full"})
    assert_same(found, reference("gpt2", "ignore"))


def test_there_are_all_meshes():
    assert len(MESHES) == 10
    assert len(LAYOUTS) == 16
