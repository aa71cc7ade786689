"""docs/private_names.md is the list of all private names that are used, with a test for each."""

import pytest

from tests import private_names
from tests.aot_executables import without_torch

PRIVATE, UNDOCUMENTED, MESSAGES, TEXT = private_names.listed()


def test_the_list_is_what_the_source_has():
    assert {(row.name, row.file) for row in PRIVATE} == private_names.used()
    assert len({row.name for row in PRIVATE}) == len(PRIVATE)
    for row in UNDOCUMENTED:
        assert row.name in (private_names.ROOT / row.file).read_text(), row


def test_the_tests_that_it_names_exist():
    tests = private_names.tests_in(TEXT)
    assert not [test for test in tests if not private_names.exists(test)]
    assert all(row.tests for row in [*PRIVATE, *UNDOCUMENTED])
    assert not private_names.exists("tests/test_private_names.py::test_that_nobody_wrote")


def test_the_messages_of_xla_are_those_that_are_read():
    assert MESSAGES == list(without_torch("_protobuf").FIELDS)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import torch\ntorch._C._new(1).x", {"torch._C._new"}),
        (
            "from torch.autograd import forward_ad as ad\nad._level",
            {"torch.autograd.forward_ad._level"},
        ),
        ("from jax._src import core", {"jax._src.core"}),
        ("def f():\n    import jax._src.core as c\n    c.f()", {"jax._src.core.f"}),
        ("import torch.utils._pytree", set()),
        (
            "import torch.utils._pytree\ntorch.utils._pytree.tree_map",
            {"torch.utils._pytree.tree_map"},
        ),
        ("import jax\njax.__version__, jax.numpy.exp, x._replace, self._held", set()),
        ("from ato_torch import _bridge\n_bridge._road", set()),
    ],
)
def test_private_names_are_found(source, wanted):
    assert private_names.names_in(source) == wanted
