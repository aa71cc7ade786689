"""A training step of a whole model by this library and by PyTorch alone: the suite `training`.

    python -m benchmarks run --suite=training [--case=PART] [--within_s=SECONDS] [--json=FILE.json]

Every row is a step of a causal transformer of 12 layers, forward, backward and optimizer, at one
length. There are as many tokens at every length. The models are

    decoder             plain PyTorch, inside `ato_torch.sdpa_override()`, in bfloat16
    decoder, autocast   the same in float32 under `torch.autocast`, as mixed precision is used
    Llama               transformers' own, by `attn_implementation="ato"` beside "sdpa"

Two copies of one model take the same tokens. First the loss and the gradient of all weights are
compared, and the library's copy has to take every layer's attention. Then the steps of both are
timed batch by batch in turns. A ratio is PyTorch's time over that of this library, so above 1 this
library is faster. The table also has the host's time of a step, and the peak of the memory.

The exit status is 1 where a result is wrong. Of times that are not steady (`noise`) no ratio is
told. `--resume` measures these again, and what --json lacks. On a CPU the models are tiny.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

import ato_jax
from benchmarks import (
    demo,
    kept,
    machine,
    noise,
    other_load,
    ours,
    progress,
    results,
    side_by_side,
    timing,
)
from benchmarks.results import ResultsError
from benchmarks.tables import Table

FLAGS = flags.FLAGS
NAME = "training"
OURS, THEIRS = "ato_torch", "PyTorch"
MODELS = ("decoder", "Llama", "decoder, autocast")
SECONDS = 0.5  # of timing for each of both
# Relative: of the loss, and of the gradient of all weights. Both copies round to the dtype.
TOLERANCES = {"bfloat16": (1e-2, 5e-2), "float32": (1e-4, 1e-3)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its sizes, and B sequences of T tokens."""

    model: str
    B: int
    T: int
    layers: int = 12
    heads: int = 12
    D: int = 64
    words: int = 8192
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.model} B{self.B} T{self.T}"

    @property
    def width(self) -> int:
        return self.heads * self.D


CASES = {
    "gpu": [Case(model, 16384 // T, T) for model in MODELS for T in (1024, 4096, 16384)],
    "cpu": [
        Case(model, 2, 32, layers=2, heads=2, D=16, words=64, dtype="float32")
        for model in MODELS[:2]
    ],
}


@dataclasses.dataclass
class Step(noise.InTurns):
    """One row: a step by both, the host's seconds of it and the bytes beyond the weights."""

    case: str
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """PyTorch's time over ours."""
        if len(self.seconds) < 2 or self.doubt:
            return None
        return self.seconds[THEIRS] / self.seconds[OURS]


def decoder(torch: Any, case: Case) -> Any:
    """A causal transformer with learned positions; from tokens to the loss of the next ones."""
    nn, F = torch.nn, torch.nn.functional  # noqa: N806 the name that users know

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            width = case.width
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:  # [B, T, width]
            heads = self.project(self.norms[0](x)).unflatten(-1, (3, case.heads, case.D))
            query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, heads, T, D]
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    class Decoder(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(case.words, case.width)
            self.positions = nn.Embedding(case.T, case.width)
            self.blocks = nn.ModuleList(Block() for _ in range(case.layers))
            self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, case.words)

        def forward(self, tokens: Any) -> Any:  # [B, T]
            x = self.words(tokens) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return Decoder()


def llama(case: Case) -> Any:
    import transformers

    import ato_torch

    ato_torch.register_hf()
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=case.words,
            hidden_size=case.width,
            intermediate_size=8 * case.width // 3,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            max_position_embeddings=case.T,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


class Trained:
    """One copy of a model, with its optimizer. `within()` is what its steps run in."""

    def __init__(self, torch: Any, model: Any, tokens: Any, case: Case, within: Any) -> None:
        self.torch, self.model, self.tokens, self.case = torch, model, tokens, case
        self.within = within
        fused = tokens.is_cuda
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)

    def loss(self) -> Any:
        if self.case.model == "Llama":
            return self.model(self.tokens, labels=self.tokens).loss
        cast = self.case.model == "decoder, autocast"
        with self.torch.autocast(self.tokens.device.type, self.torch.bfloat16, enabled=cast):
            return self.model(self.tokens)

    def gradient(self) -> tuple[float, Any]:
        """The loss, and the gradient of all weights in one tensor."""
        with self.within():
            loss = self.loss()
            found = self.torch.autograd.grad(loss, list(self.model.parameters()))
        return loss.item(), self.torch.cat([one.flatten().float() for one in found])

    def step(self, _: int = 0) -> Any:
        with self.within():
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
        self.optimizer.step()
        return loss


def both(torch: Any, case: Case, platform: str) -> tuple[dict[str, Trained], Callable[[], int]]:
    """Both copies, and how many calls of attention this library has taken so far."""
    import ato_torch

    device = torch.device("cuda" if platform == "gpu" else "cpu")
    dtype = torch.float32 if "autocast" in case.model else getattr(torch, case.dtype)
    torch.manual_seed(0)
    is_llama = case.model == "Llama"
    with device:
        model = (llama(case) if is_llama else decoder(torch, case)).to(dtype)
    tokens = torch.randint(0, case.words, (case.B, case.T), device=device)
    theirs, count = copy.deepcopy(model), 0

    @contextlib.contextmanager
    def override() -> Any:
        nonlocal count
        with ato_torch.sdpa_override() as calls:
            yield
        count += sum(calls.taken.values())

    within: Any = override
    if is_llama:
        within = contextlib.nullcontext
        model.set_attn_implementation("ato")
        count = sum(len(layer.calls) for layer in ato_torch.check_model(model, tokens[:1]).ours)
    trained = {
        OURS: Trained(torch, model, tokens, case, within),
        THEIRS: Trained(torch, theirs, tokens, case, contextlib.nullcontext),
    }
    return trained, lambda: count


def measured(torch: Any, case: Case, platform: str) -> Step:
    """The row of a case: compared, then timed."""
    row = Step(str(case))
    try:
        trained, taken = both(torch, case, platform)
        losses, gradients = {}, {}
        for name, one in trained.items():
            losses[name], gradients[name] = one.gradient()
        apart = (gradients[OURS] - gradients[THEIRS]).norm() / gradients[THEIRS].norm()
        row.errors = {
            "loss": abs(losses[OURS] / losses[THEIRS] - 1),
            "gradient": apart.item(),
        }
        del gradients
        for (what, error), most in zip(row.errors.items(), TOLERANCES[case.dtype], strict=True):
            if not error <= most:  # a comparison that NaN does not pass
                row.wrong = f"the {what} is {error:.1e} from PyTorch's"
                return row
        if taken() != case.layers:
            row.wrong = f"ato_torch took {taken()} of {case.layers} layers"
            return row
        for name, one in trained.items():
            if platform == "gpu":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            for _ in range(2):
                one.step()
            if platform == "gpu":
                torch.cuda.synchronize()
                row.memory[name] = torch.cuda.max_memory_allocated() - before
        watch = other_load.Watch(platform)

        def wait(_: Any) -> None:
            if platform == "gpu":
                torch.cuda.synchronize()

        times = timing.interleaved(
            [one.step for one in trained.values()], wait, platform, SECONDS
        )
        row.load = watch.told()
        for name, timed in zip(trained, times, strict=True):
            row.seconds[name], row.host[name] = timed.seconds, timed.host
            row.batches[name] = list(timed.batches)
    except torch.OutOfMemoryError:
        row.skipped = "out of memory"
    except ModuleNotFoundError as error:
        row.skipped = f"{error.name} is not installed"
    except Exception as error:  # of a model, or of its library: the next one may run
        row.wrong = side_by_side.refusal(error)
    return row


def table(rows: Iterable[Step], *more: str) -> Table:
    lines, notes = [], [*more]
    for row in rows:
        if row.skipped or row.wrong:
            notes.append(f"{row.case}: {row.skipped or 'WRONG: ' + row.wrong}")
            continue
        mark = noise.MARK * bool(row.doubt)
        cells = [mark + demo.milliseconds(row.seconds[name]) for name in (OURS, THEIRS)]
        hosts = [demo.milliseconds(row.host[name]) for name in (OURS, THEIRS)]
        peaks = [f"{row.memory[name] / 1e9:.2f}" for name in (OURS, THEIRS) if name in row.memory]
        told = noise.NOISY if row.ratio is None else f"{row.ratio:.3f}"
        errors = [f"{error:.1e}" for error in row.errors.values()]
        lines.append([row.case, told, *cells, *hosts, *(peaks or ["-", "-"]), *errors])
    both = (OURS, THEIRS)
    head = ["", "ratio", *(f"{name}, ms" for name in both)]
    head += [f"the host's time, {name}, ms" for name in both]
    head += [f"beyond the weights, {name}, GB" for name in both]
    head += ["error of the loss", "error of the gradient"]
    steady = ratios(rows)
    if steady:
        slower = sum(one < 1 for one in steady)
        least = f"the least ratio is {min(steady):.3f}"
        notes.append(f"{slower} of {len(steady)} steps are slower than {THEIRS}'s; {least}.")
    return Table("A training step by PyTorch over that by ato_torch", head, lines, notes)


def tables(path: Path) -> list[Table]:
    """The table of a file that `write` wrote, or none where it has no rows."""
    facts, rows = kept.rows_of(path, NAME, Step.of_file)
    return [table(rows, kept.told_of(facts))] if rows else []


def ratios(rows: Iterable[Step]) -> list[float]:
    """Those of the steady steps."""
    return [row.ratio for row in rows if row.ratio is not None]


def ratios_of(path: Path) -> list[float]:
    """Those of a file that `write` wrote; none where there is no file."""
    return ratios(kept.rows_of(path, NAME, Step.of_file)[1]) if path.exists() else []


def write(rows: Iterable[Step], facts: dict[str, Any]) -> None:
    if FLAGS.json:
        told = [
            {**dataclasses.asdict(row), "ratio": row.ratio, "doubt": row.doubt} for row in rows
        ]
        results.write(Path(FLAGS.json), json.dumps({**facts, "rows": told}, indent=1) + "\n")


def main() -> int:
    start = time.monotonic()
    platform = ours.platform()
    if platform not in results.PLATFORMS:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    if FLAGS.dtype or FLAGS.peer or FLAGS.forward_only:
        raise ResultsError(f"{NAME} has no --dtype, no --peer and no --forward_only")
    wanted = [case for case in CASES[platform] if FLAGS.case in str(case)]
    if not wanted:
        names = "; ".join(map(str, CASES[platform]))
        raise ResultsError(f"No row of {NAME} contains --case={FLAGS.case!r}: {names}")
    try:
        import torch
    except ImportError:
        logging.error("PyTorch is not installed: pip install '.[torch]'")
        return 1
    if platform == "gpu" and not torch.cuda.is_available():
        logging.error("JAX has a GPU, but this PyTorch finds none")
        return 1
    facts = {
        "device": torch.cuda.get_device_name() if platform == "gpu" else demo.processor(),
        "commit": machine.commit(),
        "ato_jax": ato_jax.__version__,
        "jax": jax.__version__,
        "torch": torch.__version__,
        "about": machine.about(),
    }
    print(f"{facts['device']}; JAX {facts['jax']}, PyTorch {facts['torch']}", flush=True)
    found = {row.case: row for row in kept.earlier_rows(NAME, Step.of_file, facts)}
    wanted = [case for case in wanted if str(case) not in found or found[str(case)].again]
    # Ahead of those that are measured again.
    wanted.sort(key=lambda case: str(case) in found)
    end = start + (FLAGS.within_s or float("inf"))
    kept.clear_the_way()
    write(found.values(), facts)
    progress.start(len(wanted), end)
    for case in wanted:
        if time.monotonic() >= end:
            found.setdefault(str(case), Step(str(case), skipped=results.NO_TIME_LEFT))
            continue
        progress.show(str(case))
        found[str(case)] = measured(torch, case, platform)
        progress.step()
        write(found.values(), facts)
        gc.collect()
        if platform == "gpu":
            torch.cuda.empty_cache()
    progress.show("")
    write(found.values(), facts)
    print("\n" + table(list(found.values())).text(), flush=True)
    if said := noise.left_out([row.doubt for row in found.values() if row.seconds]):
        print(f"\n{said}", flush=True)
    print(f"\n{NAME} took {time.monotonic() - start:.0f} s", flush=True)
    kept.say()
    return int(any(row.wrong for row in found.values()))
