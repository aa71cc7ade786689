"""ato_torch.attention against PyTorch's own MATH backend, over the grid of arguments that it has.

On a CPU as few combinations as it takes for each value of each argument to meet each value of every
other; on a GPU all of them. Each takes programs of its own, whose compiler takes nearly all of the
time.
"""

import itertools

import numpy as np
import pytest

from tests import numerics

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_torch  # noqa: E402

MASKS = {
    "no mask": None,
    "bool [T, S]": (torch.bool, "TS"),
    "bool [B, 1, 1, S]": (torch.bool, "B11S"),
    "bool [B, H, T, S]": (torch.bool, "BHTS"),
    "float [T, S]": (torch.float32, "TS"),
    "float [B, H, T, S]": (torch.float32, "BHTS"),
    "float [1, H, 1, S]": (torch.float32, "1H1S"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SQUARE = (9, 9)
# More keys, and more queries: either with each other option but the scale, by which it is chosen.
OBLONG = {None: (5, 12), 0.3: (12, 5)}
# T = S, the heads of keys and values where there are 4 of queries, scale, transposed in memory.
GRID = [
    (mask, causal, dtype, SQUARE if square else OBLONG[scale], G, scale, transposed)
    for mask, causal, dtype, square, G, scale, transposed in itertools.product(
        MASKS, (False, True), DTYPES, (True, False), (4, 1), OBLONG, (False, True)
    )
    if not (causal and MASKS[mask])  # refused, there as here
]
B, H, D = 2, 4, 16


def arguments(mask, dtype, sizes, G, transposed, device):
    generator = torch.Generator().manual_seed(0)
    T, S = sizes
    axes = {"B": B, "H": H, "T": T, "S": S, "1": 1}

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    def memory(heads, length):
        if transposed:
            return draw(B, length, heads, D).transpose(1, 2)
        return draw(B, heads, length, D)

    tensors = [memory(heads, length).to(dtype) for heads, length in ((H, T), (G, S), (G, S))]
    if MASKS[mask] is not None:
        kind, letters = MASKS[mask]
        drawn = draw(*(axes[letter] for letter in letters))
        if kind is torch.bool:
            drawn = drawn > -0.5
            drawn[..., 0] = True  # a query that sees nothing has tests of its own
        tensors.append(drawn)
    tensors = [tensor.to(device) for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    return tensors


def results(function, tensors, cotangent, **options):
    """The output, and the gradients of q, k, v and of a float mask."""
    out = function(*tensors[:3], *tensors[3:], **options)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    gradients = torch.autograd.grad(out, wanted, cotangent.to(out))
    names = ("dq", "dk", "dv", "dbias")
    return {"out": out.detach()} | dict(zip(names, gradients, strict=False))


def math(tensors, precision, cotangent, **options):
    """PyTorch's MATH backend on a CPU in that precision."""
    exact = [
        tensor.detach().cpu().to(precision if tensor.is_floating_point() else tensor.dtype)
        for tensor in tensors
    ]
    for ours, theirs in zip(tensors, exact, strict=True):
        theirs.requires_grad_(ours.requires_grad)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        function = torch.nn.functional.scaled_dot_product_attention
        return results(function, exact, cotangent, **options)


def check(mask, causal, dtype, sizes, G, scale, transposed, device="cpu"):
    tensors = arguments(mask, dtype, sizes, G, transposed, device)
    options = {"is_causal": causal, "scale": scale, "enable_gqa": G != H}
    cotangent = torch.randn(B, H, sizes[0], D, generator=torch.Generator().manual_seed(1))
    cotangent = cotangent.to(dtype)
    found = results(ato_torch.attention, tensors, cotangent, **options)
    exact = math(tensors, torch.float64, cotangent, **options)
    ideal = math(tensors, torch.float32, cotangent, **options)
    assert found.keys() == exact.keys()
    for name, tensor in found.items():
        assert tensor.device.type == torch.device(device).type
        rounded = ideal[name].to(tensor.dtype)
        numerics.check(
            name,
            tensor.cpu().float().numpy().astype(np.float64),
            exact[name].numpy(),
            dtype=str(dtype).removeprefix("torch."),
            ideal=rounded.float().numpy().astype(np.float64),
        )


def pairs(combination):
    return set(itertools.combinations(enumerate(combination), 2))


def few():
    """Combinations with all the pairs of values that there are: each the one with most new ones."""
    chosen, missing = [], set().union(*map(pairs, GRID))
    while missing:
        chosen.append(max(GRID, key=lambda combination: len(pairs(combination) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@pytest.mark.parametrize("combination", few(), ids=str)
def test_grid(combination):
    check(*combination)


# In as many parts as keep the workers of a large card busy to the end.
def part(combination):
    mask, causal, dtype, sizes, *_ = combination
    return "causal" if causal else mask, dtype, "T = S" if sizes == SQUARE else "T != S"


@pytest.mark.gpu
@pytest.mark.kernels("attention")
@pytest.mark.parametrize(
    "chosen", dict.fromkeys(map(part, GRID)), ids=lambda chosen: ", ".join(map(str, chosen))
)
def test_grid_on_a_gpu(chosen):
    for combination in GRID:
        if part(combination) == chosen:
            check(*combination, device="cuda")
