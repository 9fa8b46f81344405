"""Any packing of a cache block is found out by a probe and undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from minipic_backend.attention.kv_layout import Selection, probe_layout

BLOCK_SIZE, HEAD_SIZE = 32, 12

Pack = Callable[[torch.Tensor], torch.Tensor]


def _rows(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.flatten()


def _columns(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.t().flatten()


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Two tokens side by side, as instructions that multiply pairs want them."""
    return numbers.view(BLOCK_SIZE // 2, 2, HEAD_SIZE).transpose(1, 2).flatten()


def _tiles(numbers: torch.Tensor) -> torch.Tensor:
    """Pairs of dims for 16 tokens at a time, as tiles of AMX want keys."""
    return numbers.view(BLOCK_SIZE // 16, 16, HEAD_SIZE // 2, 2).transpose(1, 2).flatten()


def _thirds(numbers: torch.Tensor) -> torch.Tensor:
    """Sizes that are no powers of two."""
    return numbers.view(BLOCK_SIZE, HEAD_SIZE // 3, 3).permute(2, 0, 1).flatten()


def _diagonals(numbers: torch.Tensor) -> torch.Tensor:
    """Rows that are each regular, but of which none begins where the one before does."""
    return torch.stack([row.roll(i) for i, row in enumerate(numbers)]).flatten()


def _shuffled(numbers: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(numbers.numel(), generator=torch.Generator().manual_seed(0))
    return numbers.flatten()[order]


PACKINGS: dict[str, Pack] = {
    packing.__name__.strip("_"): packing
    for packing in (_rows, _columns, _pairs, _tiles, _thirds, _diagonals, _shuffled)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pack_values", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("pack_keys", PACKINGS.values(), ids=PACKINGS)
def test_packing_is_undone(pack_keys: Pack, pack_values: Pack, dtype: torch.dtype) -> None:
    """Also where the cache's dtype counts no further than 256."""

    def write(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pack_keys(numbers.to(dtype)), pack_values(numbers.to(dtype))

    layout = probe_layout(write, BLOCK_SIZE, HEAD_SIZE)
    plain = torch.randn(3, 2, BLOCK_SIZE, HEAD_SIZE).to(dtype)  # [blocks, heads, tokens, dims]

    def packed(pack: Pack) -> torch.Tensor:
        blocks = [[pack(head).view(BLOCK_SIZE, HEAD_SIZE) for head in block] for block in plain]
        return torch.stack([torch.stack(block) for block in blocks])

    torch.testing.assert_close(
        layout.keys(packed(pack_keys)), plain.transpose(2, 3), rtol=0, atol=0
    )
    torch.testing.assert_close(layout.values(packed(pack_values)), plain, rtol=0, atol=0)
    # Tokens gathered, in an order of their own, out of a cache whose halves lie side by side.
    cache = torch.cat((packed(pack_keys), packed(pack_values)), dim=2)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ids = torch.tensor([2, 0, 2])
    rows = plain[ids].transpose(0, 1).reshape(2, -1, HEAD_SIZE)  # [heads, 3 · tokens, dims]
    for pieces in [((0, 96),), ((3, 40), (41, 64), (70, 71))]:
        chosen = Selection(ids, BLOCK_SIZE, pieces)
        want = torch.cat([rows[:, start:end] for start, end in pieces], dim=1)
        for halves in ((key_cache, value_cache), (key_cache.clone(), value_cache.clone())):
            assert torch.equal(layout.gather_keys(halves[0], chosen), want.transpose(1, 2))
            assert torch.equal(layout.gather_values(halves[1], chosen), want)


@pytest.mark.parametrize("pack", PACKINGS.values(), ids=PACKINGS)
def test_numbers_are_looked_up_only_where_a_packing_has_no_strides(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up costs four times as much as a copy."""
    layout = probe_layout(lambda numbers: (pack(numbers),) * 2, BLOCK_SIZE, HEAD_SIZE)
    looked_up: list[int] = []
    real = torch.Tensor.index_select

    def noting(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        looked_up.append(dim)
        return real(tensor, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", noting)
    cache = torch.zeros(4, 2, BLOCK_SIZE, HEAD_SIZE)
    chosen = Selection(torch.tensor([3, 1]), BLOCK_SIZE, ((5, 40),))
    layout.gather_keys(cache, chosen)
    layout.gather_values(cache, chosen)
    irregular = pack in (_diagonals, _shuffled)
    assert looked_up == ([0, 2, 0, 2] if irregular else [0, 0])


def test_gathering_copies_the_blocks_alone() -> None:
    """Not the cache, which may hold gigabytes."""
    for pack in PACKINGS.values():

        def write(numbers: torch.Tensor, pack: Pack = pack) -> tuple[torch.Tensor, torch.Tensor]:
            return pack(numbers), pack(numbers)

        layout = probe_layout(write, BLOCK_SIZE, HEAD_SIZE)
        cache = torch.zeros(4096, 2, 2 * BLOCK_SIZE, HEAD_SIZE)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            for half, gather in zip(
                cache.chunk(2, dim=2), (layout.gather_keys, layout.gather_values), strict=True
            ):
                gather(half, Selection(torch.tensor([5, 7]), BLOCK_SIZE, ((1, 40),)))
        largest = max(event.cpu_memory_usage for event in seen.key_averages())
        assert 0 < largest < cache.numel()  # a quarter of the cache's bytes


def test_layers_of_equal_strides_and_other_heads() -> None:
    """As where vLLM gives every layer's blocks the room of the largest."""
    layout = probe_layout(lambda numbers: (numbers.flatten(),) * 2, BLOCK_SIZE, HEAD_SIZE)
    whole = torch.randn(4, 3, BLOCK_SIZE, HEAD_SIZE)
    chosen = Selection(torch.tensor([3, 1]), BLOCK_SIZE, ((5, 40),))
    rows = whole[[3, 1]].transpose(0, 1).flatten(1, 2)[:, 5:40]
    for num_heads in (1, 3, 2):
        assert torch.equal(layout.gather_values(whole[:, :num_heads], chosen), rows[:num_heads])


def test_a_cache_that_is_not_made_of_lines_is_refused() -> None:
    chosen = Selection(torch.arange(2), BLOCK_SIZE, ((0, 40),))
    whole = torch.zeros(2, 2, BLOCK_SIZE, HEAD_SIZE + 1)
    for cache in (whole[..., :HEAD_SIZE], whole.transpose(2, 3)):
        with pytest.raises(ValueError, match="lines"):
            chosen.lines(cache)


def test_plain_layouts_copy_nothing() -> None:
    for pack in (_rows, _columns):

        def write(numbers: torch.Tensor, pack: Pack = pack) -> tuple[torch.Tensor, torch.Tensor]:
            return pack(numbers), numbers.flatten()

        layout = probe_layout(write, BLOCK_SIZE, HEAD_SIZE)
        blocks = torch.randn(2, 1, BLOCK_SIZE, HEAD_SIZE)
        assert layout.keys(blocks).data_ptr() == blocks.data_ptr()
        assert layout.values(blocks).data_ptr() == blocks.data_ptr()


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_large_heads(head_size: int) -> None:
    """More numbers in a block than two digits count."""
    order = torch.randperm(128 * head_size, generator=torch.Generator().manual_seed(1))

    def write(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = numbers.to(torch.bfloat16).flatten()[order]
        return packed, packed

    layout = probe_layout(write, 128, head_size)
    plain = torch.randn(1, 1, 128, head_size)
    packed = plain.flatten()[order].view(plain.shape)
    assert torch.equal(layout.values(packed), plain)
    assert torch.equal(layout.keys(packed), plain.transpose(2, 3))


def test_kernel_that_loses_numbers_is_refused() -> None:
    def rounding(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return numbers.flatten() // 2, numbers.flatten()

    with pytest.raises(ValueError, match="permutation"):
        probe_layout(rounding, BLOCK_SIZE, HEAD_SIZE)


def test_layout_of_the_kernel_that_is_installed() -> None:
    """vLLM's own CPU kernel writes a block; the layout reads it back."""
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("vLLM without its CPU kernels")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads, size, dim = 2, 32, 64
    for dtype in (torch.float32, torch.bfloat16):
        isa = _get_attn_isa(dtype, size, dim)

        def cache(keys: torch.Tensor, values: torch.Tensor, dtype=dtype, isa=isa) -> list:  # type: ignore[no-untyped-def,type-arg]
            blocks = [torch.zeros(1, heads, size, dim, dtype=dtype) for _ in range(2)]
            slots = torch.arange(size, dtype=torch.int64)
            ops.cpu_attn_reshape_and_cache(keys, values, *blocks, slots, isa)
            return blocks

        def write(numbers: torch.Tensor, dtype=dtype) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
            one = numbers[:, None].expand(-1, heads, -1).to(dtype).contiguous()
            key_block, value_block = cache(one, one)
            return key_block[0, 0].flatten(), value_block[0, 0].flatten()

        layout = probe_layout(write, size, dim)
        keys, values = (torch.randn(size, heads, dim).to(dtype) for _ in range(2))
        key_block, value_block = cache(keys, values)
        assert torch.equal(layout.keys(key_block)[0], keys.permute(1, 2, 0))
        assert torch.equal(layout.values(value_block)[0], values.permute(1, 0, 2))
