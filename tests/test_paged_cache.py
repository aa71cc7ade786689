"""PagedCache: a long random walk beside a plain model of it, refusals, in place, in the layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ato_jax
from ato_jax import PagedCache, nn

P, PAGE, B, PAGES, T = 24, 4, 6, 8, 7


def empty(**sizes: Any) -> PagedCache:
    options = {"num_pages": P, "page_size": PAGE, "num_kv_heads": 1, "head_dim": 2, "v_head_dim": 1}
    return PagedCache.empty(B, PAGE * PAGES, **({"dtype": jnp.float32} | options | sizes))


def tokens(*numbers: Any) -> tuple[jax.Array, jax.Array]:
    """k and v [N, T, 1, 2 and 1] that tell which token it is."""
    rows = jnp.asarray(numbers, jnp.float32)[..., None, None]
    return jnp.concatenate([rows, -rows], -1), 2 * rows


def same(one: PagedCache, other: PagedCache) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# The walk


class Model:
    """What a PagedCache should do, with lists: a page is a list of one number, who share it."""

    def __init__(self) -> None:
        self.keys: list[list[float] | None] = [None] * B
        self.pages: list[list[list[int]]] = [[] for _ in range(B)]
        self.left = P

    def first_free(self) -> int:
        return self.keys.index(None) if None in self.keys else -1

    def allocate(self) -> int:
        slot = self.first_free()
        if slot >= 0:
            self.keys[slot] = []
        return slot

    def append(self, wanted: dict[int, list[float]]) -> bool:
        """One sequence after another; all of them or none."""
        shared = {id(page): page[0] for row in self.pages for page in row}
        copies, needed = [], 0
        for slot, new in wanted.items():
            keys = self.keys[slot]
            if keys is None or len(keys) + len(new) > PAGE * PAGES:
                return False
            needed += -(-(len(keys) + len(new)) // PAGE) - len(self.pages[slot])
            if new and len(keys) % PAGE and shared[id(self.pages[slot][-1])] > 1:
                shared[id(self.pages[slot][-1])] -= 1
                copies.append(slot)
        if needed + len(copies) > self.left:
            return False
        for slot in copies:
            self.pages[slot][-1][0] -= 1
            self.pages[slot][-1] = [1]
        for slot, new in wanted.items():
            self.keys[slot] += new
            while len(self.pages[slot]) * PAGE < len(self.keys[slot]):
                self.pages[slot].append([1])
        self.left -= needed + len(copies)
        return True

    def fork(self, slot: int, length: int) -> int:
        new = self.first_free()
        if new < 0 or self.keys[slot] is None or not 0 <= length <= len(self.keys[slot]):
            return -1
        self.keys[new] = self.keys[slot][:length]
        self.pages[new] = self.pages[slot][: -(-length // PAGE)]
        for page in self.pages[new]:
            page[0] += 1
        return new

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            for page in self.pages[slot]:
                page[0] -= 1
                self.left += page[0] == 0
            self.keys[slot], self.pages[slot] = None, []


def agree(cache: PagedCache, model: Model) -> None:
    """The invariants of the module's docstring, and every key of every sequence."""
    # Not NumPy's own assertions, which take four times as long.
    held = PagedCache(*(np.asarray(array) for array in cache))
    assert held.lengths.tolist() == [0 if keys is None else len(keys) for keys in model.keys]
    assert held.active.tolist() == [keys is not None for keys in model.keys]
    used = np.arange(PAGES) * PAGE < held.lengths[:, None]
    assert np.array_equal(held.page_table >= 0, used)
    ids = held.page_table[used]
    assert np.array_equal(held.references, np.bincount(ids, minlength=P))
    free_pages = np.sort(held.free_pages[: held.available])
    assert np.array_equal(free_pages, np.flatnonzero(held.references == 0))
    assert held.available == model.left
    sharers = [page[0] for row in model.pages for page in row]
    assert held.references[ids].tolist() == sharers
    wanted = np.array([key for keys in model.keys if keys for key in keys])
    seen = np.arange(PAGE * PAGES) < held.lengths[:, None]
    for array, factors in ((held.k_pages, [1, -1]), (held.v_pages, [2])):
        found = array[held.page_table].reshape(B, PAGE * PAGES, -1)[seen]
        assert np.array_equal(found, np.outer(wanted, factors))


def test_random_walk() -> None:
    """10,000 operations, each compared with the model: every page and every key is where it is."""
    draw = np.random.default_rng(0)
    jitted = functools.partial(jax.jit, donate_argnums=0)
    put = jitted(lambda cache, k, v, counts: cache.append(k, v, counts=counts))
    put_some = jitted(
        lambda cache, k, v, slots, counts: cache.append(k, v, slots=slots, counts=counts)
    )
    one_more = jitted(lambda cache, k, v: cache.append(k, v))
    allocate = jitted(lambda cache: cache.allocate())
    fork = jitted(lambda cache, slot, length: cache.fork(slot, length))
    free = jitted(lambda cache, slots: cache.free(slots))
    defragment = jitted(lambda cache: cache.defragment())
    cache, model, number = empty(), Model(), 1
    outcomes: dict[tuple[str, bool], int] = {}
    operations = draw.choice(
        ["allocate", "one more", "put", "put some", "fork", "free", "defragment"],
        10_000,
        p=[0.15, 0.25, 0.1, 0.1, 0.18, 0.2, 0.02],
    )
    for name in operations:
        done = True
        if name in ("one more", "put", "put some"):
            size = 1 if name == "one more" else T
            slots = draw.permutation(B)[:2] if name == "put some" else np.arange(B)
            counts = draw.integers(0, size + 1, slots.size) if size > 1 else np.ones(B, int)
            numbers = number + np.arange(slots.size * size).reshape(slots.size, size)
            number += numbers.size
            k = np.stack([numbers, -numbers], -1)[:, :, None].astype(np.float32)
            v = 2 * k[..., :1]
            wanted = {
                int(slot): list(map(float, row[:count]))
                for slot, row, count in zip(slots, numbers, counts, strict=True)
                if name == "put some" or model.keys[slot] is not None
            }
            if name == "one more":
                cache, done = one_more(cache, k, v)
            elif name == "put":
                cache, done = put(cache, k, v, counts)
            else:
                cache, done = put_some(cache, k, v, slots, counts)
            done = bool(done)
            assert done == model.append(wanted)
        elif name == "allocate":
            cache, slot = allocate(cache)
            done = int(slot) >= 0
            assert int(slot) == model.allocate()
        elif name == "fork":
            slot = int(draw.integers(B))
            held = len(model.keys[slot] or [])
            length = held if draw.random() < 0.5 else int(draw.integers(0, held + 2))
            cache, new = fork(cache, slot, length)
            done = int(new) >= 0
            assert int(new) == model.fork(slot, length)
        elif name == "free":
            slots = draw.integers(-1, B, 2)
            slots[1] = -1 if draw.random() < 0.7 else slots[1]
            cache = free(cache, slots)
            model.free([slot for slot in set(slots) if slot >= 0 and model.keys[slot] is not None])
        else:
            cache = defragment(cache)
            assert np.all(np.asarray(cache.page_table) < P - model.left)
        agree(cache, model)
        outcomes[name, done] = outcomes.get((name, done), 0) + 1
    # It went through everything, refusals too.
    for name in ("allocate", "one more", "put", "put some", "fork"):
        assert min(outcomes[name, True], outcomes[name, False]) > 50, outcomes
    cache = cache.free(np.flatnonzero(np.asarray(cache.active)))
    assert int(cache.available) == P and not np.any(cache.references)


# In place


@pytest.mark.parametrize("G", [1, 2])
def test_in_place(G: int) -> None:
    """With donation the pages stay where they are, and nothing of their size is beside them."""
    cache = empty(num_pages=512, num_kv_heads=G, head_dim=64, v_head_dim=32)
    cache, slot = cache.allocate()
    k, v = jnp.ones((1, 3, G, 64)), jnp.ones((1, 3, G, 32))
    for operation, arguments in (
        (lambda cache, k, v, slots: cache.append(k, v, slots=slots), (k, v, slot[None])),
        (lambda cache, slot: cache.fork(slot), (slot,)),
        (lambda cache, k, v, slots: cache.append(k, v, slots=slots), (k, v, slot[None])),
        (lambda cache: cache.defragment(), ()),
        (lambda cache, slot: cache.free(slot), (slot,)),
    ):
        compiled = jax.jit(operation, donate_argnums=0).lower(cache, *arguments).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes > cache.k_pages.nbytes + cache.v_pages.nbytes
        # `defragment` has 64 of the 512 pages in hand at once.
        assert memory.temp_size_in_bytes < cache.v_pages.nbytes / 2
        where = [cache.k_pages.unsafe_buffer_pointer(), cache.v_pages.unsafe_buffer_pointer()]
        found = compiled(cache, *arguments)
        old, cache = cache, found[0] if isinstance(found[0], PagedCache) else found
        assert old.k_pages.is_deleted()
        assert where == [array.unsafe_buffer_pointer() for array in (cache.k_pages, cache.v_pages)]
    assert int(cache.lengths.sum()) == 3


def test_jit_runs_without_a_trace_of_the_checks() -> None:
    """An effect in the program would keep jit from its fast way to call it."""
    cache = empty()
    k, v = tokens(*[[1]] * B)
    q = jnp.ones((B, 1, 2, 2))
    for step in (
        lambda cache: cache.append(k, v),
        lambda cache: cache.fork(0),
        lambda cache: ato_jax.decode_attention(q, *cache[:4]),
    ):
        assert not jax.make_jaxpr(step)(cache).effects


# Refusals


def filled() -> PagedCache:
    """Slot 0 with 9 keys, slot 1 with none, others free; all but 3 pages in use."""
    cache = empty(num_pages=6)
    cache, _ = cache.allocate()
    cache, _ = cache.allocate()
    return cache.append(*tokens(range(9)), slots=[0])[0]


REFUSED = [
    (
        lambda cache: cache.append(*tokens(range(13)), slots=[1]),
        r"^k needs 4 more pages, and of P = 6 there are 3 left: free\(\) a sequence",
    ),
    (
        lambda cache: cache.append(*tokens(range(24)), slots=[0]),
        r"^k would make sequences of \[33\] keys, and page_table has room for S = 32 each",
    ),
    (
        lambda cache: cache.append(*tokens([1], [2]), slots=[0, 2]),
        r"^slots must name allocated ones, got \[0 2\]: call allocate\(\) first",
    ),
    (
        lambda cache: cache.append(*tokens([1], [2]), slots=[0, 0]),
        r"^slots must name none twice, got \[0 0\]",
    ),
    (
        lambda cache: cache.append(*tokens([1], [2]), slots=[0, 6]),
        r"^slots must lie between -1 and B - 1 = 5, got \[0 6\]",
    ),
    (
        lambda cache: cache.append(*tokens([1], [2]), slots=[0, 1], counts=[1, 2]),
        r"^counts must lie between 0 and T = 1, got \[1 2\]",
    ),
    (
        lambda cache: cache._replace(page_table=cache.page_table.at[0, 2].set(77)).append(
            *tokens([1], [2]), slots=[0, 1]
        ),
        r"^page_table must lie between 0 and P - 1 = 5 where used, got \[77 -1\]",
    ),
    (lambda cache: cache.fork(2), r"^slot must be an allocated one, got 2"),
    (lambda cache: cache.fork(-1), r"^slot must be an allocated one, got -1"),
    (
        lambda cache: cache.fork(0, 10),
        r"^length must lie between 0 and the sequence's 9, got 10",
    ),
    (
        lambda cache: cache._replace(active=jnp.ones(B, bool)).fork(0),
        r"^fork\(\) needs a free slot, and all B = 6 are taken",
    ),
    (
        lambda cache: cache._replace(active=jnp.ones(B, bool)).allocate(),
        r"^allocate\(\) needs a free slot, and all B = 6 are taken",
    ),
    (lambda cache: cache.free([0, 3]), r"^slots must name allocated ones, got \[0 3\]"),
    (lambda cache: cache.fork(99), r"^slot must be an allocated one, got 99"),
    (
        lambda cache: cache.append(*tokens([1]), slots=[99]),
        r"^slots must lie between -1 and B - 1 = 5, got \[99\]",
    ),
    (
        lambda cache: cache.append(*tokens([1]), slots=[0], counts=[99]),
        r"^counts must lie between 0 and T = 1, got \[99\]",
    ),
    (lambda cache: cache.fork(0, -7), r"^length must lie between 0 and .* 9, got -7"),
    (lambda cache: cache.free([-9, 0]), r"^slots must name allocated ones, got \[-9  0\]"),
    (lambda cache: cache.free(6), r"^slots must name allocated ones, got \[6\]"),
]


@pytest.mark.parametrize(("operation", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_refusals(operation: Any, message: str) -> None:
    """A ValueError; inside jit nothing is done, and a flag or -1 says so; an error in `checked`."""
    with pytest.raises(ValueError, match=message):
        operation(filled())
    error, found = jax.jit(ato_jax.checked(operation))(filled())
    with pytest.raises(Exception, match=message.removeprefix("^")):
        error.throw()
    if isinstance(found, PagedCache):  # of what is freed, the rest is
        assert found.active.tolist() == [message == REFUSED[-1][1], True, *[False] * 4]
        return
    cache, answer = found
    assert int(answer) == (0 if answer.dtype == bool else -1)
    for name in ("k_pages", "v_pages", "lengths", "references", "free_pages", "available"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(filled(), name))
    np.testing.assert_array_equal(cache.page_table[1:], filled().page_table[1:])


def test_checked_finds_nothing_where_nothing_is_wrong() -> None:
    @jax.jit
    def step(cache: PagedCache) -> Any:
        cache, slot = cache.fork(0)
        cache, _ = cache.append(*tokens([1], [2]), slots=jnp.stack([slot, 0]))
        return cache.free(0), ato_jax.decode_attention(jnp.ones((B, 1, 2, 2)), *cache[:4])

    # Without checks first: what jit remembers of that must not serve for the other.
    wanted = step(filled())
    error, found = ato_jax.checked(step)(filled())
    assert error.get() is None
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    error, _ = ato_jax.checked(step)(filled()._replace(active=jnp.ones(B, bool)))
    assert "fork() needs a free slot" in error.get()


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_checked_pages(implementation: str) -> None:
    """Under jit a page that there is not is seen by nobody, and `checked` reports it."""
    cache = filled()

    @jax.jit
    def attend(cache: PagedCache) -> jax.Array:
        with ato_jax.interpret():
            return ato_jax.decode_attention(
                jnp.ones((B, 1, 2, 2)), *cache[:4], implementation=implementation
            )

    out = attend(cache)
    unused = cache._replace(page_table=cache.page_table.at[0, 3:].set(99))
    np.testing.assert_array_equal(attend(unused), out)
    assert ato_jax.checked(attend)(unused)[0].get() is None
    for wrong in (-1, 6):
        bad = cache._replace(page_table=cache.page_table.at[0, 0].set(wrong))
        error, found = ato_jax.checked(attend)(bad)
        assert "page_table must lie between 0 and P - 1 = 5 where used, got" in error.get()
        np.testing.assert_array_equal(found, attend(bad))
    for wrong in (-1, 33):
        bad = cache._replace(lengths=cache.lengths.at[1].set(wrong))
        error, _ = ato_jax.checked(attend)(bad)
        assert "lengths must lie between 0 and S=32, got" in error.get()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: empty(page_size=0), "^page_size must be an int of at least 1, got 0"),
        (lambda cache: empty(num_pages=2.0), "^num_pages must be an int of at least 1"),
        (
            lambda cache: PagedCache.empty(
                1, 1, num_pages=1, page_size=1, num_kv_heads=1, head_dim=1, dtype="int8"
            ),
            "^dtype must be one of 'bfloat16'",
        ),
        (
            lambda cache: cache._replace(page_table=cache.page_table.astype(float)).free(0),
            "^page_table must be int32 in a PagedCache, got float32",
        ),
        (
            lambda cache: cache._replace(lengths=cache.lengths[:2]).allocate(),
            r"^lengths must be \[B\] with B=6, got shape \(2,\)",
        ),
        (
            lambda cache: cache.append(*(x.astype(jnp.bfloat16) for x in tokens([1])), slots=[0]),
            "^k must be float32 as the cache is, got bfloat16",
        ),
        (lambda cache: cache.append([[[[1, 2]]]], [[[[1]]]]), "^k must be float16, bfloat16 or"),
        (lambda cache: cache.append(*tokens([1])), r"^k must be \[N, T, G, D\] with N=6"),
        (
            lambda cache: cache.append(tokens([1])[0], tokens([1])[0], slots=[0]),
            r"^v must be \[N, T, G, V\] with N=1, T=1, G=1, V=1, got shape \(1, 1, 1, 2\)",
        ),
        (lambda cache: cache.append(*tokens([1]), slots=[0.0]), "^slots must hold integers"),
        (lambda cache: cache.append(*tokens([1]), slots=[0, 1]), r"^slots must be \[N\] with N=1"),
        (
            lambda cache: cache.append(*tokens([1]), slots=[0], counts=[True]),
            "^counts must hold integers, got bool",
        ),
        (lambda cache: cache.fork([0]), r"^slot must be a scalar, got shape \(1,\)"),
        (lambda cache: empty(dtype="foo"), "^dtype must be one of 'bfloat16', .* got 'foo'"),
        (lambda cache: empty(dtype=None), "^dtype must be one of 'bfloat16', .* got None"),
        (lambda cache: cache.fork(0, 1.0), "^length must hold integers"),
        (lambda cache: cache.free("0"), "^slots must hold integers"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(filled())


def test_none_to_free() -> None:
    for nobody in ([], (), np.zeros(0, int)):
        same(filled().free(nobody), filled())


# In the layer

SIZES = {"num_heads": 4, "in_features": 12, "qkv_features": 16, "causal": True}
LENGTH = 24


def layer(**options: Any) -> tuple[nn.Attention, jax.Array]:
    made = nn.Attention(**SIZES, **options, rngs=nnx.Rngs(0))
    shape = (2, LENGTH, 12)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), options.get("dtype", "float32"))
    made.init_cache(shape, x.dtype, page_size=4)
    return made, x


def close(found: Any, wanted: Any, limit: float = 2e-5) -> None:
    found, wanted = (np.asarray(array, np.float32) for array in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)


step = nnx.jit(lambda model, x, mask=None: model(x, decode=True, mask=mask))


@pytest.mark.parametrize(("dtype", "prompt"), [("float32", 0), ("float32", 19), ("bfloat16", 5)])
@pytest.mark.parametrize(
    "options",
    [{"num_kv_heads": 2, "rope_theta": 1e4}, {"window": (5, None), "sinks": True, "softcap": 2.0}],
    ids=["groups and rope", "window, sinks, softcap"],
)
def test_decoding(options: dict[str, Any], dtype: str, prompt: int) -> None:
    """A prompt, short or long, and then a token at a time equal the whole causal pass."""
    model, x = layer(dtype=jnp.dtype(dtype), **options)
    wanted = model(x)
    found = [step(model, x[:, :prompt])] if prompt else []
    found += [step(model, x[:, i : i + 1]) for i in range(prompt, LENGTH)]
    close(jnp.concatenate(found, 1), wanted, 2e-5 if dtype == "float32" else 1e-2)
    assert np.isnan(step(model, x[:, :1])).all()
    with pytest.raises(ValueError, match="page_table has room for S = 24 each"):
        model(x[:, :1], decode=True)


def test_decoding_of_a_fork() -> None:
    """Two sequences of one prompt, each with what it appended itself; what is free gives 0."""
    model, x = layer(rope_theta=1e4)
    step(model, x[:, :6])
    variable = model.paged_cache
    cache, slot = variable.get_value().free(1).fork(0)
    variable.set_value(cache)
    assert int(slot) == 1 and int(cache.available) == 2 * LENGTH // 4 - 2
    for i in range(6, 9):
        found = step(model, x[:, i : i + 1])
    other = jnp.concatenate([x[0, :6], x[1, 6:9]])
    close(found[0, 0], model(x[:1, :9])[0, -1])
    close(found[1, 0], model(other[None])[0, -1])
    variable.set_value(variable.get_value().free(1))
    close(step(model, x[:, 9:10])[0], model(x[:1, :10])[0, -1:])
    close(step(model, x[:, 10:11])[1], model.out(jnp.zeros((1, 4, 4))))


def test_decoding_with_a_mask_and_dropout() -> None:
    """What the kernel of pages has no argument for goes over the keys in a row."""
    model, x = layer(dropout_rate=0.5, deterministic=True)
    plain, _ = layer(dropout_rate=0.5, deterministic=True)
    plain.init_cache(x.shape)
    mask = jnp.asarray(np.random.default_rng(1).random((2, 1, 1, LENGTH)) < 0.7)
    for start, stop in ((0, 5), (5, 6)):
        close(step(model, x[:, start:stop], mask), step(plain, x[:, start:stop], mask))
    found, wanted = (
        each(x[:, 6:7], decode=True, deterministic=False, rngs=nnx.Rngs(3))
        for each in (model, plain)
    )
    close(found, wanted)
    assert plain.paged_cache is None and model.cached_key is None


def test_caches_of_the_layer() -> None:
    """Too few pages, bad arguments, other batches: errors that leave the cache as it was."""
    model, x = layer()
    model.init_cache(x.shape, page_size=4, num_pages=3)
    with pytest.raises(ValueError, match="^k needs 4 more pages, and of P = 3 there are 3 left"):
        model(x[:, :5], decode=True)
    assert np.isnan(step(model, x[:, :5])).all()
    step(model, x[:, :3])
    before = model.paged_cache.get_value()
    with pytest.raises(ValueError, match=r"^mask must broadcast to"):
        model(x[:, :1], decode=True, mask=np.ones((2, 1, 1, LENGTH + 1), bool))
    same(model.paged_cache.get_value(), before)
    with pytest.raises(ValueError, match="^paged_cache holds 2 sequences in float32.* to 1 in"):
        model(x[:1, :1], decode=True)
    with pytest.raises(ValueError, match="^num_pages needs a page_size, got 3 alone"):
        model.init_cache(x.shape, num_pages=3)
    with pytest.raises(ValueError, match="^page_size must divide input_shape's length, got 5 and"):
        model.init_cache(x.shape, page_size=5)
    with pytest.raises(ValueError, match="^dtype must be .* got 'foo'"):
        model.init_cache(x.shape, "foo", page_size=4)
    model.init_cache(x.shape)
    close(step(model, x), model(x))


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("x64", [False, True])
def test_all_operations_one_after_the_other(page: int, x64: bool) -> None:
    """The state keeps its types, and nothing is as much as something."""
    with jax.enable_x64(x64):
        cache = PagedCache.empty(
            3, 12, num_pages=30, page_size=page, num_kv_heads=1, head_dim=2, dtype=jnp.float16
        )
        types = jax.tree.map(jnp.dtype, [leaf.dtype for leaf in cache])
        cache, slot = cache.allocate()
        for length in (0, 5, 1, 0):
            k = jnp.ones((1, length, 1, 2), jnp.float16)
            cache, fits = cache.append(k, k, slots=slot[None])
            assert fits
        cache, other = cache.fork(slot)
        k = jnp.ones((3, 1, 1, 2), jnp.float16)
        cache, _ = cache.append(k, k)
        cache = cache.free(slot)
        cache = cache.defragment()
        assert [leaf.dtype for leaf in cache] == types
        assert cache.lengths[other] == 7
