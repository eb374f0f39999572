"""Linear maps whose weights are codes, and the form in which codes are kept on the device.

    e2m1 on disk   byte j of a row: numbers 2 j (low) and 2 j + 1; a ue8m0 for each 32 numbers, a group

    e2m1 here, for rows as they are: per 128 numbers, a block, 32 words of 16 bits and an int32
                     word j           bits 4 i .. 4 i + 3: number 32 i + j
                     int32            the four ue8m0
    and for rounded rows, `eight`:
                     word 4 q + t     three bits of each of numbers 32 t + 4 q .. + 3, their sizes, four bits apart
                     fourth bits      signs. Words t = 0 and 1 (2 and 3) as 32 bits have those of t at bits 7, 15, 23, 31,
                                      of t + 1 at 3, 11, 19, 27
                     int32            bits 4 t .. 4 t + 3: the scale of group t over that of the block, 0 .. 11 for 2 ** -5
                                      .. 2 ** 6; bits 16 .. 23: that of the block, ue8m0

    and for rounded rows of experts, in the order of lanes: as `eight`, but
                     word 4 q + c     numbers 4 c .. + 3 of half a group: the half q % 2 of group q // 2
                     bytes            the scale of each group over one base of the whole row, 0 .. 11 as above
                     float32          that base

In the first, a word gives a number to each of four groups. In the second, sizes choose four bytes from a table of eight
that has their group's scale in it: e4m3 numbers, exact, and one scale is left for the block. Groups more than 2 ** 11
below the largest of their block are rounded to what can be said there, by at most 2 ** -12 of the largest scale, and
`repack` warns of them. The third takes only stacks of matrices whose groups are all within 2 ** 11 of their row's largest:
others stay in the second form. Rows of all lie in tiles: see Words.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

from splitserve.ops.kernels.archs import FIRST_FP8
from splitserve.ops.kernels.launch import arch_of
from splitserve.ops.kernels.tuned import tuned
from splitserve.ops.ref.v4.quant import Mxfp4, Tiles, Weight, dequantise, ue8m0_to_float
from splitserve.ops.triton import scaled
from splitserve.ops.triton.grouping import group_pairs
from splitserve.ops.triton.multiply import Codes, Lanes, Matrix, Words, expand, many_rows, multiply, rounded
from splitserve.ops.triton.rounding import BLOCK, Rounded, quantise_rows, round_placed, round_rows

_log = logging.getLogger(__name__)

LARGEST_SCALE = 128  # ue8m0 of 2: what a bf16 product can take in together with the codes' missing 2 ** 120


def prepare(weight: Weight, *, exact: bool = True) -> Matrix:
    """The form that kernels read; once, after loading. Raises ValueError where `repack` does.

    `exact`: for rows as they are; else for rows that are rounded first, which matters for e2m1 only.
    """
    match weight:
        case Mxfp4():
            arch = arch_of(weight.codes)
            eight = not exact and arch >= FIRST_FP8 and tuned("rounded_e2m1", arch)["EIGHT"]
            device = weight.codes.device
            if eight and multiplies_right(device, lanes=True) and (found := in_lanes(weight)):
                return found
            return repack(weight, eight=eight and multiplies_right(device))
        case Tiles():
            scaled.works(
                weight.codes.device
            )  # asked now, since no product may be tried while graphs are recorded
            powers = weight.scales.dtype == torch.uint8
            scales = ue8m0_to_float(weight.scales) if powers else weight.scales
            return Codes(weight.codes, scales.contiguous(), weight.tile, powers)
        case _:
            return weight


def repack(weight: Mxfp4, *, eight: bool) -> Words:
    """Raises ValueError for widths that are no multiple of 128 and for scales above 2."""
    num_out, size = _sizes(weight)
    stack, scales = (t.reshape(-1, *t.shape[-2:]) for t in (weight.codes, weight.scales))
    codes = torch.empty(len(stack), num_out, size // 4, dtype=torch.int16, device=stack.device)
    words = torch.empty(len(stack), size // BLOCK, num_out, dtype=torch.int32, device=stack.device)
    lost = 0
    for i in range(len(stack)):  # one expert at a time: numbers take eight times their codes
        numbers = _numbers(stack[i])
        if eight:
            numbers, words[i], rounded_ = _one_scale(numbers, scales[i].view(num_out, -1, 4).int())
            codes[i] = _tiled(_packed(numbers))
            lost += rounded_
        else:
            four = numbers.flatten(-2).transpose(-1, -2)  # [out, blocks, 32, 4]
            codes[i] = _tiled(
                (four[..., 0] | four[..., 1] << 4 | four[..., 2] << 8 | four[..., 3] << 12).to(torch.int16)
            )
            words[i] = scales[i].contiguous().view(torch.int32).t()
    if lost:
        _log.warning("%d of %d groups of MXFP4 weights were rounded: far smaller than others beside them",
                     lost, scales.numel())  # fmt: skip
    return Words(
        codes.view(*weight.codes.shape[:-1], -1), words.view(*weight.codes.shape[:-2], -1, num_out), eight
    )


def in_lanes(weight: Mxfp4) -> Lanes | None:
    """None where these are no experts, or do not fit: see above. Raises ValueError as `repack` does."""
    num_out, size = _sizes(weight)
    if weight.codes.dim() != 3 or not Lanes.fits(num_out, size):
        return None
    count, device = len(weight.codes), weight.codes.device
    codes = torch.empty(count, num_out, size // 4, dtype=torch.int16, device=device)
    over = torch.empty(count, size // 256, num_out, 2, 4, dtype=torch.uint8, device=device)
    bases = torch.empty(count, num_out, dtype=torch.float32, device=device)
    for i in range(count):
        empty = ((weight.codes[i] & 0x77) == 0).view(num_out, -1, 16).all(-1)
        scales = weight.scales[i].int()
        top = scales.where(~empty, 0).amax(-1, keepdim=True)
        scales = scales.where(~empty, top)
        if (top - scales > 11).any():
            _log.info(
                "MXFP4 experts with groups more than 2 ** 11 apart in a row: their products take a fifth longer"
            )
            return None
        base = (top - 6).clamp(min=1)
        over[i] = (scales - base + 5).view(num_out, -1, 2, 4).transpose(0, 1)
        bases[i] = (base[:, 0] << 23).view(torch.float32)
        lanes = _numbers(weight.codes[i]).view(num_out, -1, 4, 2, 4, 4).permute(0, 1, 4, 2, 3, 5)
        codes[i] = _tiled(_packed(lanes.reshape(num_out, -1, 4, 8, 4)))
    return Lanes(codes, over, bases)


def _sizes(weight: Mxfp4) -> tuple[int, int]:
    """Rows and numbers in a row, which a kernel can take."""
    num_out, size = weight.codes.shape[-2], weight.codes.shape[-1] * 2
    if size % BLOCK:
        raise ValueError(f"{size} numbers in a row: not a multiple of {BLOCK}")
    if weight.scales.numel() and int(weight.scales.max()) > LARGEST_SCALE:
        raise ValueError(f"an MXFP4 scale of 2 ** {int(weight.scales.max()) - 127}; up to 2 is served")
    return num_out, size


def _numbers(
    codes: torch.Tensor,  # [out, in / 2]
) -> torch.Tensor:  # [out, blocks, 4 groups, 8, 4] int32 codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1, 4, 8, 4).int()


@cache
def multiplies_right(device: torch.device, *, lanes: bool = False) -> bool:
    """Whether products of e2m1 in eight bits come out right there: they rely on how a compiler lays numbers out.

    A small product is tried; where it is wrong, that is logged. True where nothing can run (meta tensors).
    """
    if device.type != "cuda":
        return True
    draw = torch.Generator("cpu").manual_seed(5)
    weight = Mxfp4(
        torch.randint(0, 256, (2, 256, 256), generator=draw, dtype=torch.uint8, device="cpu"),
        torch.randint(115, 125, (2, 256, 16), generator=draw, dtype=torch.uint8, device="cpu"),
    )
    there = Mxfp4(weight.codes.to(device), weight.scales.to(device))
    here = in_lanes(there) if lanes else repack(there, eight=True)
    assert here is not None
    x = torch.randn(6, 512, generator=draw, device="cpu").bfloat16()
    experts = torch.arange(6)[:, None] % 2
    x = x.to(device)
    numbers = dequantise(weight, torch.float32)
    want = torch.stack([numbers[i % 2] @ row for i, row in enumerate(round_rows(x).float().cpu())])
    for block in (16, 64):
        groups = group_pairs(experts.to(device), local=range(2), block=block)
        if many_rows(here, groups):
            rows: Rounded = round_placed(x[groups.rows_of.clamp(min=0)], groups, len(x), lanes=lanes)
        else:
            rows = quantise_rows(x, lanes=lanes)
        got = multiply(rows, here, groups=groups).float().cpu()
        if not (got - want).abs().max() <= want.abs().max() / 64:  # NaN is wrong too
            _log.error(
                "products of MXFP4 in eight bits%s are wrong on %s with this Triton; %s are used, which take %s: "
                "please report it with `splitserve doctor`", " in the order of lanes" if lanes else "",
                torch.cuda.get_device_name(device), "others" if lanes else "those of 16 bits",
                "a fifth longer" if lanes else "about twice as long",
            )  # fmt: skip
            return False
    return True


def _one_scale(
    numbers: torch.Tensor,  # [out, blocks, 4 groups, 8, 4] int32 codes
    scales: torch.Tensor,  # [out, blocks, 4] int32 ue8m0
) -> tuple[torch.Tensor, torch.Tensor, int]:  # numbers, [blocks, out] int32, how many groups were rounded
    """Scales of groups over that of their block."""
    empty = ((numbers & 7) == 0).flatten(-2).all(-1)
    scales = scales.where(~empty, scales.where(~empty, 0).amax(-1, keepdim=True))
    block = (scales.amax(-1) - 6).clamp(min=1)
    over = scales - block[..., None] + 5
    low = over < 0
    if lost := int(low.sum()):
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=numbers.device)
        small = sizes[numbers & 7] * torch.exp2(over.clamp(max=0).float())[..., None, None]
        nearest = torch.bucketize(small, (sizes[1:] + sizes[:-1]) / 2).int()
        numbers = torch.where(low[..., None, None], (numbers & 8) | nearest, numbers)
    over = over.clamp(min=0)
    word = over[..., 0] | over[..., 1] << 4 | over[..., 2] << 8 | over[..., 3] << 12 | block << 16
    return numbers, word.t(), lost


def _packed(
    numbers: torch.Tensor,  # [out, blocks, 4 groups, 8, 4] int32 codes
) -> torch.Tensor:  # [out, blocks, 32] int16
    """Words: sizes where they belong, signs where they fit."""
    size, sign = numbers & 7, numbers >> 3
    word = size[..., 0] | size[..., 1] << 4 | size[..., 2] << 8 | size[..., 3] << 12  # [out, blocks, 4, 8]
    even, odd = sign[:, :, 0::2], sign[:, :, 1::2]
    word[:, :, 0::2] |= even[..., 0] << 7 | even[..., 1] << 15 | odd[..., 0] << 3 | odd[..., 1] << 11
    word[:, :, 1::2] |= even[..., 2] << 7 | even[..., 3] << 15 | odd[..., 2] << 3 | odd[..., 3] << 11
    return word.transpose(-1, -2).flatten(-2).to(torch.int16)


def _tiled(words: torch.Tensor) -> torch.Tensor:
    """[out, blocks, 32] -> [out, 32 * blocks], in memory as Words has it."""
    num_out, blocks, _ = words.shape
    height = Words.height(num_out)
    return words.view(-1, height, blocks, 32).transpose(1, 2).reshape(num_out, -1)


def linear(
    x: torch.Tensor,  # [T, in] bf16
    weight: Matrix,  # [out, in]
) -> torch.Tensor:  # [T, out]
    """Twin of ref.v4.linear: products with x as it is. Weights of numbers go to cuBLAS, and for many rows codes too."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight)
    if isinstance(weight, Codes) and len(x) >= tuned("expand", arch_of(x))["ROWS"]:
        return F.linear(x, expand(weight))
    return multiply(x, weight)


def linear_rounded(
    x: torch.Tensor,  # [T, in] bf16
    weight: Codes | Words | Lanes,  # [out, in]
) -> torch.Tensor:  # [T, out]
    """As `linear`, with each 128 neighbours of x rounded to e4m3 first, as DeepSeek's own recipe has it.

    Products of eight bits are used where they are faster: ours, or for many rows cuBLAS'.
    """
    rows = rounded(x, weight)
    return multiply(rows, weight) if isinstance(rows, Rounded) else linear(rows, weight)
