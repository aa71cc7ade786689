"""Calls under torch.autocast: a call like one before is not checked again, and gives its bits."""

import contextlib
import itertools

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_torch  # noqa: E402
from ato_torch import _checked_calls, _checks, _programs  # noqa: E402

B, H, T, D = 1, 2, 9, 8
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
CALLS = {
    "attention": lambda *tensors: ato_torch.attention(*tensors, is_causal=True),
    "linear_attention": lambda *tensors: ato_torch.linear_attention(*tensors, causal=True),
}
# Nested states of autocast, from the outermost: the dtype, or None where it is disabled. Then the
# dtype of a call inside.
STATES = {
    "off": ((), None),
    "bfloat16": ((BFLOAT16,), BFLOAT16),
    "float16": ((FLOAT16,), FLOAT16),
    "float16 inside": ((BFLOAT16, FLOAT16), FLOAT16),
    "disabled inside": ((BFLOAT16, None), None),
    "bfloat16 again": ((FLOAT16, None, BFLOAT16), BFLOAT16),
}
# Dtypes of query, key and value.
DTYPES = {
    "float32": (FLOAT32,) * 3,
    "bfloat16": (BFLOAT16,) * 3,
    "float16": (FLOAT16,) * 3,
    "mixed": (FLOAT32, BFLOAT16, FLOAT32),
}


@contextlib.contextmanager
def within(nested, device="cpu"):
    with contextlib.ExitStack() as stack:
        for dtype in nested:
            stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        yield


def draw(dtypes, transposed=False, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(B, H, T, D, generator=generator).to(device, dtype) for dtype in dtypes]
    if transposed:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    return [tensor.requires_grad_() for tensor in tensors]


def step(call, leaves):
    """The result, the gradients, and the result without them."""
    out = call(*leaves)
    cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    with torch.no_grad():
        return [out.detach(), *gradients, call(*leaves)]


def equal(found, wanted):
    return all(
        one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.fixture
def checks(monkeypatch):
    """One entry for each call whose arguments are all checked; no call is known at first."""
    _checked_calls.checked.clear()
    _programs.kept.clear()
    found = []
    check_all = _checks.check_all

    def counted(*arguments, **options):
        found.append(arguments)
        check_all(*arguments, **options)

    monkeypatch.setattr(_checks, "check_all", counted)
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_state(name, transposed, checks, monkeypatch):
    """States alternate, so that a call would find another state's program if one were mixed up."""
    call = CALLS[name]
    wanted = {}
    with monkeypatch.context() as patch:
        patch.setattr(_checked_calls, "checked_call", lambda *_: None)
        for state, inputs in itertools.product(STATES, DTYPES):
            nested, dtype = STATES[state]
            if dtype is None and inputs == "mixed":
                continue
            leaves = draw(DTYPES[inputs], transposed)
            with within(nested):
                wanted[state, inputs] = step(call, leaves)
            # Autocast is a cast of the arguments, and nothing else.
            cast = [leaf.to(dtype or leaf.dtype) for leaf in leaves]
            assert torch.equal(wanted[state, inputs][0], call(*cast))
    assert len(checks) == 3 * len(wanted)  # twice each inside of autocast, once outside
    for n in range(3):
        checks.clear()
        for state, inputs in wanted:
            nested, dtype = STATES[state]
            leaves = draw(DTYPES[inputs], transposed)
            with within(nested):
                found = step(call, leaves)
            assert equal(found, wanted[state, inputs]), (state, inputs, n)
            assert found[0].dtype == (dtype or leaves[0].dtype)
            assert [each.dtype for each in found[1:4]] == [leaf.dtype for leaf in leaves]
        # One check for each dtype that a program computes in, with gradients and without.
        assert len(checks) == (6 if n == 0 else 0), n
    for nested in ((), (BFLOAT16, None)):
        with within(nested), pytest.raises(ValueError, match="key must have query's dtype"):
            call(*draw(DTYPES["mixed"], transposed))


@pytest.mark.parametrize("name", CALLS)
def test_what_autocast_leaves(name, checks):
    """float64 is not cast, and the autocast of another kind of device does not count."""
    call = CALLS[name]
    for _ in range(3):
        with within((BFLOAT16,)), pytest.raises(ValueError, match=r"query must be .*float64"):
            call(*draw([torch.float64] * 3))
        with within((BFLOAT16,)), pytest.raises(ValueError, match="query must be a torch.Tensor"):
            call(1, *draw(DTYPES["float32"])[1:])
        with torch.autocast("mtia", BFLOAT16):
            assert call(*draw(DTYPES["float32"])).dtype == FLOAT32


def test_a_mask_is_cast(checks):
    """As PyTorch's attention casts it: else a mask in float32 would be one more dtype."""
    tensors, mask = draw(DTYPES["float32"]), torch.randn(T, T)
    wanted = ato_torch.attention(*(x.bfloat16() for x in tensors), mask.bfloat16())
    with within((BFLOAT16,)):
        assert torch.equal(ato_torch.attention(*tensors, mask), wanted)


@pytest.mark.gpu
@pytest.mark.kernels("attention", "linear_attention")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_on_a_gpu(name, dtype, checks):
    call, leaves = CALLS[name], draw(DTYPES["float32"], device="cuda")
    cast = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    for _ in range(3):
        wanted = step(call, cast)
    wanted[1:4] = [gradient.float() for gradient in wanted[1:4]]
    checks.clear()
    for _ in range(3):
        with within((dtype,), "cuda"):
            found = step(call, leaves)
        assert equal(found, wanted)
    assert not checks
