"""Private names of PyTorch and of JAX that are gone: what is said then, and what still works."""

import jax
import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

from ato_jax import device  # noqa: E402
from ato_torch import _direct, _plan, _private  # noqa: E402
from tests import private_names  # noqa: E402
from tests.test_torch_direct import building, driver  # noqa: E402, F401  fixtures


def test_what_every_call_needs():
    """Is there, is looked for at the import, and is listed so."""
    _private.check()
    rows, *_ = private_names.listed()
    assert {row.name for row in rows if row.gone == "import"} == set(_private.NEEDED)


@pytest.mark.parametrize(
    "name", ["torch._C._functorch.peek_interpreter_stack", "torch._subclasses.FakeTensor"]
)
def test_one_that_is_gone_is_named(monkeypatch, name):
    place, _, last = name.rpartition(".")
    monkeypatch.delattr(_private.pkgutil.resolve_name(place), last)
    with pytest.raises(
        ImportError, match=f"ato_torch needs {name}, which PyTorch 2.* 2.11 to 2.13"
    ):
        _private.check()


@pytest.mark.parametrize("name", ["_cuda_getDevice", "_cuda_getCurrentRawStream"])
def test_a_name_of_the_direct_road_that_is_gone(building, monkeypatch, name):  # noqa: F811
    monkeypatch.delattr(torch._C, name)
    monkeypatch.setattr(_direct, "_warned", set())
    with pytest.warns(RuntimeWarning, match=f"goes through JAX.*AttributeError.*{name}"):
        closed = _direct.plan_of(building(), [torch.ones(1, 2, 3)] * 2)
    assert isinstance(closed, _direct.ClosedError)


def test_an_allocator_without_the_private_one(monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", "private", raising=False)
    assert _plan.allocator() == "private"
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    asked = []
    monkeypatch.setattr(torch, "empty_strided", lambda *size, **where: asked.append((size, where)))
    _plan.allocator()((2, 3), (3, 1), torch.float16)
    assert asked == [(((2, 3), (3, 1)), {"dtype": torch.float16, "device": "cuda"})]
    monkeypatch.delattr(torch._C._dynamo, "guards")
    assert callable(_plan.allocator())


@pytest.mark.gpu
def test_a_card_is_described():
    card = device.describe(jax.devices()[0])
    found = torch.cuda.get_device_properties(0)
    assert card.capability == (found.major, found.minor)
    assert card.multiprocessors == found.multi_processor_count
