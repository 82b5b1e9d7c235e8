"""What the simulator keeps of types so as not to make them again is what Triton would make."""

from triton import language as tl

from strobe.kernels.device.dialect import gl, gluon
from strobe.sim import simulate
from strobe.sim.names import names_when_asked


def test_types_of_tuples_have_the_names_that_triton_gives_them():
    makes = [
        lambda: tl.tuple_type([tl.int32, tl.pointer_type(tl.bfloat16)], ["a", "b"]),
        lambda: tl.tuple_type([]),
        lambda: tl.tuple_type([tl.float32]),
    ]
    spelled = [str(make()) for make in makes]
    with names_when_asked():
        assert "name" not in vars(makes[0]())
        assert [str(make()) for make in makes] == [make().name for make in makes] == spelled
    assert [str(make()) for make in makes] == spelled


@gluon.jit
def types_kernel(seen: gl.constexpr):
    """The types of the same operations twice over, in two layouts, go to `seen`."""
    for size in gl.static_range(1, 3):
        layout: gl.constexpr = gl.BlockedLayout([size], [32], [4], [0])
        places = gl.arange(0, 256, layout)
        whole = gl.full([256], 1.5, gl.float32, layout)
        memory = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0]), whole)
        gl.static_print(
            seen([places.type, whole.type, memory.load(layout).type, (places < 7).type, (whole + places).type])
        )


def test_equal_types_are_one_object_and_unequal_ones_are_not():
    seen: list = []
    with simulate():
        types_kernel[(2,)](seen.append, num_warps=4)
    first, other, *again = seen
    assert [str(kind) for kind in first] != [str(kind) for kind in other]
    assert again == [first, other]
    assert all(one is same for before, after in zip(seen, again) for one, same in zip(before, after))
    int32, float32, loaded, compared, summed = first
    assert float32 is loaded is summed and (int32.scalar, float32.scalar, compared.scalar) == (
        tl.int32,
        tl.float32,
        tl.int1,
    )
    assert {kind.layout for kind in first} == {gl.BlockedLayout([1], [32], [4], [0])}
