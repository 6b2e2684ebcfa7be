"""Every form in which a compiled program writes collectives: lines that XLA printed for H100s and TPU v5p, shortened.

Where no compiler at hand prints a form (it says so), the line follows XLA's printer.
"""

from typing import Any

import pytest

from jaxpar.parallel.collectives import Collective, parse_collectives

MESH = {"pipe": 1, "data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}


def program(*lines: str, computations: str = "", header: str = ", num_partitions=8") -> str:
    """A module whose entry computation holds `lines`."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule jit_step, is_scheduled=true{header}

FileNames
1 "step.py"
{computations}
ENTRY %main.0_spmd (param.1: f32[4,16]) -> f32[4,16] {{
  %param.1 = f32[4,16]{{1,0}} parameter(0), sharding={{devices=[4,2]<=[8]}}, metadata={{op_name="x"}}
{body}
}}
"""


def only(text: str, **options: Any) -> Collective:
    (collective,) = parse_collectives(text, MESH, **options)
    return collective


# Asynchronous pairs: the start holds operands and results, the done repeats the result and must not count.

GPU_PAIRS = {
    "all-reduce": (
        "%all-reduce-start = bf16[2,16,64]{2,1,0} all-reduce-start(%bitcast.81.0), channel_id=3, "
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%add.clone, "
        'metadata={op_name="jit(loss)/jvp()/while/body/bsf,fd->bsd/dot_general" stack_frame_id=7}',
        "%all-reduce-done = bf16[2,16,64]{2,1,0} all-reduce-done(%all-reduce-start)",
        Collective(
            "all-reduce",
            ("tensor",),
            1,
            (("bf16", (2, 16, 64)),),
            4096,
            4096,
            "jit(loss)/jvp()/while/body/bsf,fd->bsd/dot_general",
        ),
    ),
    "all-reduce with its operands": (  # jax 0.12
        "%all-reduce-start.2 = ((bf16[16384]{0}), bf16[16384]{0}) all-reduce-start(%concatenate), channel_id=7, "
        "replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%add.2.clone, "
        "output_to_operand_aliasing={{1}: (0, {})}",
        "%all-reduce-done.2 = bf16[16384]{0} all-reduce-done(%all-reduce-start.2)",
        Collective("all-reduce", ("data", "fsdp"), 1, (("bf16", (16384,)),), 32768, 49152, ""),
    ),
    "all-reduce of several arrays": (
        "%all-reduce-start = (f32[128,64]{1,0}, bf16[64]{0}) all-reduce-start(%a, %b), channel_id=7, "
        "replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%add.2.clone",
        "%all-reduce-done = (f32[128,64]{1,0}, bf16[64]{0}) all-reduce-done(%all-reduce-start)",
        Collective("all-reduce", ("data", "fsdp"), 1, (("f32", (128, 64)), ("bf16", (64,))), 32896, 49344, ""),
    ),
    "all-gather": (
        "%all-gather-start = (f32[4,16]{1,0}, f32[16,16]{1,0}) all-gather-start(%param.1), channel_id=1, "
        "replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true",
        "%all-gather-done = f32[16,16]{1,0} all-gather-done(%all-gather-start)",
        Collective("all-gather", ("data", "fsdp"), 1, (("f32", (16, 16)),), 1024, 768, ""),
    ),
    "all-gather of several arrays": (
        "%all-gather-start.1 = ((bf16[32,128]{1,0}, f32[32,128]{1,0}), (bf16[64,128]{1,0}, f32[64,128]{1,0})) "
        "all-gather-start(%loop_convert_fusion.2, %get-tuple-element.62.0), channel_id=4, "
        "replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true",
        "%all-gather-done.1 = (bf16[64,128]{1,0}, f32[64,128]{1,0}) all-gather-done(%all-gather-start.1)",
        Collective("all-gather", ("fsdp",), 1, (("bf16", (64, 128)), ("f32", (64, 128))), 49152, 24576, ""),
    ),
    "reduce-scatter": (
        "%reduce-scatter-start = ((f32[512,512]{1,0}), f32[128,512]{1,0}) reduce-scatter-start(%gemm_fusion_dot.2), "
        "channel_id=3, replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}, use_global_device_ids=true, "
        "dimensions={0}, to_apply=%add.clone",
        "ROOT %reduce-scatter-done = f32[128,512]{1,0} reduce-scatter-done(%reduce-scatter-start)",
        Collective("reduce-scatter", ("data", "fsdp"), 1, (("f32", (512, 512)),), 1048576, 786432, ""),
    ),
    "all-to-all": (
        "%all-to-all-start = ((f32[256,2,256]{2,0,1}), f32[256,2,256]{2,0,1}) all-to-all-start(%bitcast.13.0), "
        "channel_id=1, replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_1'}, dimensions={1}",
        "%all-to-all-done = f32[256,2,256]{2,0,1} all-to-all-done(%all-to-all-start)",
        Collective("all-to-all", ("data",), 1, (("f32", (256, 2, 256)),), 524288, 262144, ""),
    ),
    "collective-permute": (
        "%collective-permute-start = (f32[4,16]{1,0:T(4,128)S(1)}, f32[4,16]{1,0:T(4,128)}, u32[]{:S(2)}, "
        "u32[]{:S(2)}) collective-permute-start(%copy-done), channel_id=1, "
        "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}",
        "%collective-permute-done = f32[4,16]{1,0:T(4,128)} collective-permute-done(%collective-permute-start)",
        Collective("collective-permute", ("data",), 1, (("f32", (4, 16)),), 256, 256, ""),
    ),
}


@pytest.mark.parametrize("form", GPU_PAIRS)
def test_an_asynchronous_pair_counts_once(form: str) -> None:
    start, done, expected = GPU_PAIRS[form]
    assert only(program(start, done)) == expected


def test_a_wrapped_collective_counts_where_its_pair_starts() -> None:  # after XLA's printer
    wrapped = """
%async_computation (p: f32[4,16]) -> f32[2,16] {
  %p = f32[4,16]{1,0} parameter(0)
  ROOT %reduce-scatter.2 = f32[2,16]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%region_1.0
}
"""
    found = only(
        program(
            "%start = ((f32[4,16]{1,0}), f32[2,16]{1,0}, s32[]) async-start(%param.1), calls=%async_computation",
            "%update = ((f32[4,16]{1,0}), f32[2,16]{1,0}, s32[]) async-update(%start), calls=%async_computation",
            "ROOT %done = f32[2,16]{1,0} async-done(%update), calls=%async_computation",
            computations=wrapped,
        )
    )
    assert found == Collective("reduce-scatter", ("data",), 1, (("f32", (4, 16)),), 256, 128, "")


def test_the_fusion_that_is_a_reduce_scatter_on_tpu() -> None:
    fused = """
%all-reduce-scatter (input: f32[512,512]) -> f32[128,512] {
  %input = f32[512,512]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[512,512]{1,0:T(8,128)} all-reduce(%input), channel_id=2, replica_groups={{0,2,4,6},{1,3,5,7}}, \
use_global_device_ids=true, to_apply=%add.clone, frontend_attributes={from-cross-replica-sharding="true"}
  ROOT %dynamic-slice.6 = f32[128,512]{1,0} dynamic-slice(%all-reduce.1, %multiply.3), dynamic_slice_sizes={128,512}
}
"""
    found = only(
        program(
            "ROOT %fusion = f32[128,512]{1,0:T(8,128)} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter",
            computations=fused,
        )
    )
    assert found == Collective("reduce-scatter", ("data", "fsdp"), 1, (("f32", (512, 512)),), 1048576, 786432, "")


def test_a_tuple_of_many_arrays_with_index_comments() -> None:
    shapes = "f32[8,1,1,32]{3,2,1,0}, bf16[8]{0}, s32[], pred[5]{0}, u32[3]{0}, /*index=5*/f8e4m3fn[7]{0}"
    found = only(
        program(
            f"ROOT %all-reduce.21 = ({shapes}) all-reduce(%a, %b, %c, %d, %e, /*index=5*/%f), channel_id=7, "
            "replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%add.2.clone"
        )
    )
    assert found.axes == ("data", "fsdp")
    assert found.operands == (
        ("f32", (8, 1, 1, 32)),
        ("bf16", (8,)),
        ("s32", ()),
        ("pred", (5,)),
        ("u32", (3,)),
        ("f8e4m3fn", (7,)),
    )
    assert found.payload_bytes == 1024 + 16 + 4 + 5 + 12 + 7
    assert found.sent_bytes == 2 * 1068 * 3 // 4


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "tensor")),
        ("{}", ("data", "fsdp", "tensor")),
        ("[4,2]<=[8]", ("tensor",)),
        ("[1,8]<=[8]", ("data", "fsdp", "tensor")),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
        ("mesh['pipe'=1,'data'=2,'fsdp'=2,'expert'=1,'context'=1,'tensor'=2] {'data','tensor'}", ("data", "tensor")),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2], device_ids=([4,2]T(1,0)) {'axis_0'}", ("tensor",)),
        # Parts of an axis and explicit device ids: after XLA's printer.
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}", ("fsdp",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1':(2)2}", ("data", "tensor")),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("fsdp",)),
        ("mesh[a=2,b=4], device_ids=(0,2,4,6,1,3,5,7) {b}", ("data", "fsdp")),
        # Half of the devices of an axis that has four, and groups of unequal sizes: no product of axes.
        ("{{0,3},{1,2},{4,7},{5,6}}", ("irregular", "fsdp", "tensor")),
        ("{{0,1,2},{3,4,5,6,7}}", ("irregular", "data", "fsdp", "tensor")),
        ("{{0,1},{2,3}}", ("irregular", "tensor")),
    ],
)
def test_forms_of_groups(groups: str, axes: tuple[str, ...]) -> None:
    line = f"ROOT %r = f32[4]{{0}} all-reduce(%param.1), channel_id=1, replica_groups={groups}, "
    found = only(program(line + 'use_global_device_ids=true, to_apply=%add, metadata={op_name="{{0,1}} [8]<=[8]"}'))
    assert found.axes == axes


def test_irregular_groups_cost_what_the_largest_does() -> None:
    line = "ROOT %r = f32[30]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2},{3,4,5,6,7}}, "
    assert only(program(line + "use_global_device_ids=true, to_apply=%add")).sent_bytes == 2 * 120 * 4 // 5


def test_a_part_of_an_axis_is_irregular() -> None:
    line = "ROOT %r = f32[1,64]{1,0} all-reduce(%bitcast.2), channel_id=1, use_global_device_ids=true, "
    text = program(
        line + "replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}, to_apply=%region_0.0.clone"
    )
    (found,) = parse_collectives(text, {"tensor": 8})
    assert (found.axes, found.sent_bytes) == (("irregular", "tensor"), 2 * 256 * 3 // 4)


@pytest.mark.parametrize(
    "attributes",
    [
        "channel_id=1, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, use_global_device_ids=true",
        "channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true",
        "channel_id=1, replica_groups=mesh['pipe'=1,'data'=8] {'pipe'}, use_global_device_ids=true",
        "replica_groups={{0}}",  # over replicas, of which there is one
    ],
)
def test_a_group_of_one_sends_nothing(attributes: str) -> None:
    text = program(f"ROOT %r = f32[4]{{0}} all-reduce(%param.1), {attributes}, to_apply=%add")
    assert parse_collectives(text, MESH) == []


def test_a_channel_without_global_ids_groups_every_partition() -> None:
    line = "ROOT %r = f32[4]{0} all-reduce(%param.1), channel_id=1, replica_groups={{0}}, to_apply=%add"
    assert only(program(line)).axes == ("data", "fsdp", "tensor")


def test_a_permute_has_the_axes_that_it_crosses() -> None:
    def permute(pairs: str) -> str:
        return f"ROOT %p = f32[4]{{0}} collective-permute(%param.1), channel_id=1, source_target_pairs={pairs}"

    assert only(program(permute("{{0,0},{2,2},{1,4},{3,6},{4,1},{6,3},{5,5},{7,7}}"))).axes == ("data", "tensor")
    assert only(program(permute("{{0,1},{2,3},{4,5},{6,7}}"))).axes == ("tensor",)
    assert parse_collectives(program(permute("{{0,0},{1,1}}")), MESH) == []


def test_a_reduce_scatter_counts_its_operand() -> None:
    line = "ROOT %r = bf16[4,2,16]{2,1,0} reduce-scatter(%param.1), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), "
    found = only(program(line + "use_global_device_ids=true, dimensions={1}, to_apply=%add"))
    assert (found.operands, found.payload_bytes, found.sent_bytes) == ((("bf16", (4, 8, 16)),), 1024, 768)


def test_branches_of_a_conditional_are_marked() -> None:
    branch = """
%region_1.0_spmd (p.{0}: f32[4,16]) -> f32[4,16] {{
  %p.{0} = f32[4,16]{{1,0}} parameter(0)
  ROOT %psum.{0} = f32[4,16]{{1,0}} all-reduce(%p.{0}), channel_id=1, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%region_2.0
}}
"""
    branches = branch.format(1) + branch.format(2).replace("region_1.0", "region_0.0")
    for attributes in (
        "branch_computations={%region_0.0_spmd, %region_1.0_spmd}",
        "true_computation=%region_0.0_spmd, false_computation=%region_1.0_spmd",
    ):
        line = f"ROOT %conditional.1 = f32[4,16]{{1,0}} conditional(%c, %x, %x), {attributes}"
        found = parse_collectives(program(line, computations=branches), MESH)
        assert [(c.axes, c.count, c.conditional) for c in found] == [(("tensor",), 1, True)] * 2


def test_device_order_moves_partitions_to_their_places_in_the_mesh() -> None:
    line = (
        "ROOT %r = f32[4]{0} all-reduce(%param.1), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true"
    )
    text = program(line + ", to_apply=%add")
    assert only(text).axes == ("tensor",)
    assert only(text, device_order=[0, 4, 1, 5, 2, 6, 3, 7]).axes == ("data",)
    with pytest.raises(ValueError, match=r"device_order=\[0, 1\] must be a permutation of the mesh's 8 positions"):
        parse_collectives(text, MESH, device_order=[0, 1])


def test_refuses_a_program_for_another_mesh() -> None:
    with pytest.raises(ValueError, match="the program is for 8 devices, but the mesh has 4"):
        parse_collectives(program(), {"data": 4})
    with pytest.raises(ValueError, match=r"the program has 2 replicas \(pmap\)"):
        parse_collectives(program(header=", replica_count=2, num_partitions=8"), MESH)
    line = "ROOT %r = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true"
    with pytest.raises(ValueError, match="%r names device 7, but the mesh has 4 devices"):
        parse_collectives(program(line, header=""), {"data": 4})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ROOT %s = f32[4]{0} ragged-all-to-all(%x), channel_id=1", "%s is a ragged-all-to-all, which is not counted"),
        ("ROOT %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1", "%s is a send, which is not counted"),
        (
            "ROOT %s = f32[4]{0} all-to-all(%x), channel_id=1, replica_groups=?",
            "groups are in a form that is not known",
        ),
        ("ROOT %s = q9[4]{0} all-to-all(%x), channel_id=1, replica_groups={}", r"an unknown dtype: q9\[4\]"),
    ],
)
def test_refuses_what_it_cannot_count(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_collectives(program(line), MESH)


def test_transfers_to_the_host_are_no_collectives() -> None:
    line = "ROOT %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true"
    assert parse_collectives(program(line), MESH) == []
