"""Train the small model in demo/model: Qwen3.5's form, 6 M parameters, on the sources of Python's standard library.

    python tools/train_small_model.py --work build/small-model --out demo/model

Two hours on two cores at most (`--steps`). Stopped, it goes on where it was: the work folder keeps weights and
optimizer as safetensors. The modules are transformers' own, with a chunked delta rule and a convolution that train
faster on a CPU. The same Python, seed and number of threads give the same weights.
"""

import argparse
import ast
import hashlib
import json
import math
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from cairn.models.random_weights.make_tokenizer import END_OF_MESSAGE, END_OF_TEXT, START_OF_MESSAGE, make_tokenizer

VOCAB_SIZE = 4096
MAX_POSITIONS = 32768
LENGTH = 1024
BATCH = 8
HELD_OUT = 25
"""One module in so many is kept from training."""
MTP_WEIGHT = 0.2
SAVE_EVERY = 50
"""Steps. What a run that is stopped loses at most."""
CHUNK = 64
LEFT_OUT = frozenset(
    ("test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "pydoc_data", "encodings")
)
"""Tests, tables, and packages that are not the library's."""

DELTA, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Document:
    """One module, or one chat about one of its functions."""

    name: str
    tokens: np.ndarray
    num_bytes: int
    is_chat: bool = False


# -- the corpus --------------------------------------------------------------------------------------------------------


def read_documents(tokenizer: Tokenizer) -> tuple[list[Document], list[Document]]:
    """Modules and chats to train on, and modules that are held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    train: list[Document] = []
    held_out: list[Document] = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if LEFT_OUT & set(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        end = tokenizer.token_to_id(END_OF_TEXT)
        tokens = np.array([*tokenizer.encode(text).ids, end], np.int32)
        document = Document(str(name), tokens, len(text.encode()))
        if int(hashlib.sha256(str(name).encode()).hexdigest(), 16) % HELD_OUT == 0:
            held_out.append(document)
            continue
        train.append(document)
        train += [
            Document(f"{name}:chat", np.array(tokenizer.encode(chat).ids, np.int32), len(chat), True)
            for chat in chats_about(text)
        ]
    return train, held_out


def chats_about(text: str) -> Iterator[str]:
    """A question and an answer for each function with a docstring: what its first line says, and its source."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            source = ast.get_source_segment(text, node, padded=True)
            if source and len(source) < 1500 and not node.name.startswith("test"):
                purpose = doc.splitlines()[0].strip().rstrip(".")
                yield (
                    f"{START_OF_MESSAGE}user\nWrite a Python function named {node.name}: {purpose}.{END_OF_MESSAGE}\n"
                    f"{START_OF_MESSAGE}assistant\n{textwrap.dedent(source).strip()}\n{END_OF_MESSAGE}\n"
                )


class Batches:
    """Rows of LENGTH + 2 tokens: all documents, in an order that is drawn anew each epoch, one behind the other."""

    def __init__(self, documents: list[Document], seed: int) -> None:
        self._documents = documents
        self._seed = seed
        self._num_tokens = sum(len(document.tokens) for document in documents)

    def batch(self, step: int) -> Tensor:
        """Shape [BATCH, LENGTH + 2]."""
        first = step * BATCH * LENGTH
        epoch = first // self._num_tokens
        stream = np.concatenate([self._epoch(epoch), self._epoch(epoch + 1)])
        start = first - epoch * self._num_tokens
        rows = [stream[start + row * LENGTH :][: LENGTH + 2] for row in range(BATCH)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _epoch(self, epoch: int) -> np.ndarray:
        if getattr(self, "_kept", (None,))[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._documents))
            self._kept = (epoch, np.concatenate([self._documents[index].tokens for index in order]))
        return self._kept[1]


# -- the model ---------------------------------------------------------------------------------------------------------


def model_config(end_of_message: int, end_of_text: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        layer_types=[DELTA, DELTA, DELTA, FULL] * 2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        tie_word_embeddings=True,
        eos_token_id=[end_of_message, end_of_text],
        pad_token_id=None,
        bos_token_id=None,
        use_cache=False,
    )


class MTPHead(nn.Module):
    """Multi-token prediction as Qwen3.5's checkpoints store it (`mtp.*`): from the hidden state at t and the embedding
    of token t + 1 the logits of token t + 2, through one attention layer and the model's own output matrix."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_hidden = modeling_qwen3_5.Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_embedding = modeling_qwen3_5.Qwen3_5RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([modeling_qwen3_5.Qwen3_5DecoderLayer(config, config.layer_types.index(FULL))])
        self.norm = modeling_qwen3_5.Qwen3_5RMSNorm(size, eps=eps)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, hidden: Tensor, embedding: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Two of shape [batch, length, size] -> one."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1)
        hidden = self.layers[0](self.fc(joined), position_embeddings=positions, attention_mask=None)
        return self.norm(hidden)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    """The gated delta rule (Yang et al., "Gated Delta Networks", 2024, section 3.3) in chunks of CHUNK tokens, from a
    zero state: as transformers' torch_chunk_gated_delta_rule, with one triangular solve in place of its loop.

    query, key: [batch, length, heads, key size]; value: [..., value size]; g, beta: [batch, length, heads].
    """
    query, key = (modeling_qwen3_5.l2norm(one.float()) for one in (query, key))
    query = query * query.shape[-1] ** -0.5
    batch, length, heads, _size = value.shape

    def chunks(one: Tensor) -> Tensor:
        return one.float().transpose(1, 2).unflatten(2, (length // CHUNK, CHUNK))

    q, k, v, decay, rate = (chunks(one) for one in (query, key, value, g, beta))
    decay = decay.cumsum(-1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
    updated = k * rate.unsqueeze(-1)
    inner = (updated @ k.mT * between).tril(-1)
    both = torch.cat([v * rate.unsqueeze(-1), updated * decay.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(inner, both, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.mT * between
    q = q * decay.exp().unsqueeze(-1)
    k = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    state = q.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    out = []
    for index in range(length // CHUNK):
        new = u[:, :, index] - w[:, :, index] @ state
        out.append(q[:, :, index] @ state + scores[:, :, index] @ new)
        state = state * decay[:, :, index, -1, None, None].exp() + k[:, :, index].mT @ new
    return torch.cat(out, dim=2).transpose(1, 2).to(value.dtype), None


def causal_conv(hidden: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> Tensor:
    """SiLU of a depthwise convolution, hidden [batch, channels, length], as a sum of shifted products: its gradient is
    cheaper than torch's."""
    taps = weight.shape[-1]
    padded = F.pad(hidden, (taps - 1, 0))
    length = hidden.shape[-1]
    return F.silu(sum(padded[..., tap : tap + length] * weight[:, tap, None] for tap in range(taps)))


class SmallModel(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.main = Qwen3_5ForCausalLM(config)
        self.mtp = MTPHead(config)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: [batch, length + 2]. Mean cross entropies of the next token and of the one behind it, in nats."""
        base, matrix = self.main.model, self.main.lm_head.weight
        hidden = base(tokens[:, :-2]).last_hidden_state
        first = F.cross_entropy((hidden @ matrix.T).flatten(0, 1).float(), tokens[:, 1:-1].flatten())
        places = torch.arange(hidden.shape[1]).expand(3, hidden.shape[0], -1)
        ahead = self.mtp(hidden, base.embed_tokens(tokens[:, 1:-1]), base.rotary_emb(hidden, places))
        second = F.cross_entropy((ahead @ matrix.T).flatten(0, 1).float(), tokens[:, 2:].flatten())
        return first, second

    def stored(self) -> dict[str, Tensor]:
        """By the names of published checkpoints."""
        named = {name: weight for name, weight in self.main.named_parameters() if name != "lm_head.weight"}
        return named | {f"mtp.{name}": weight for name, weight in self.mtp.named_parameters()}


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """What was seen every so many steps."""

    steps: list[int]
    next_token: list[float]
    token_after: list[float]
    seconds: float = 0.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in 100 steps, level, and down to a twentieth in the last 40 % (a warm-up, stable, decay schedule)."""
    decay_from = int(steps * 0.6)
    if step < 100:
        return peak * (step + 1) / 100
    if step < decay_from:
        return peak
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - decay_from) / (steps - decay_from))))


def train(model: SmallModel, batches: Batches, work: Path, steps: int, peak: float, console: Console) -> Curve:
    # TorchInductor needs a C++ compiler; with it a step takes .6 of the time.
    losses = torch.compile(model.losses) if shutil.which("g++") else model.losses
    weights = dict(model.named_parameters())
    plain = [weight for weight in weights.values() if weight.ndim < 2]
    matrices = [weight for weight in weights.values() if weight.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    curve, step = resume(weights, optimizer, work)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, completed=step, loss="")
        while step < steps:
            began = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            with torch.autocast("cpu", torch.bfloat16):
                first, second = losses(batches.batch(step))
            (first + MTP_WEIGHT * second).backward()
            nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            curve.seconds += time.monotonic() - began
            if step % 10 == 0:
                curve.steps.append(step)
                curve.next_token.append(round(first.item(), 4))
                curve.token_after.append(round(second.item(), 4))
            step += 1
            progress.update(task, completed=step, loss=f"{first.item():.3f}")
            if step % SAVE_EVERY == 0 or step == steps:
                save(weights, optimizer, curve, step, work)
                if not console.is_terminal:
                    print(f"step {step} of {steps}: {first.item():.3f} {second.item():.3f}, {curve.seconds:.0f} s")
    return curve


def save(weights: dict, optimizer: torch.optim.AdamW, curve: Curve, step: int, work: Path) -> None:
    """Weights, the optimizer's two averages, and the curve; the last of three files makes them count."""
    tensors = {f"weight.{name}": weight.detach() for name, weight in weights.items() if name != "main.lm_head.weight"}
    for name, weight in weights.items():
        for field in ("exp_avg", "exp_avg_sq"):
            tensors[f"{field}.{name}"] = optimizer.state[weight][field]
    save_file(tensors, work / f"state-{step}.safetensors")
    (work / "new.json").write_text(json.dumps({"step": step, "curve": asdict(curve)}))
    (work / "new.json").rename(work / "progress.json")
    for old in work.glob("state-*.safetensors"):
        if old.name != f"state-{step}.safetensors":
            old.unlink()


def resume(weights: dict, optimizer: torch.optim.AdamW, work: Path) -> tuple[Curve, int]:
    if not (work / "progress.json").exists():
        return Curve([], [], []), 0
    progress = json.loads((work / "progress.json").read_text())
    step = progress["step"]
    tensors = load_file(work / f"state-{step}.safetensors")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[f"weight.{name}"])
            optimizer.state[weight] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"exp_avg.{name}"],
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
            }
    return Curve(**progress["curve"]), step


@torch.no_grad()
def bits_per_byte(model: SmallModel, documents: list[Document]) -> float:
    """Over whole documents, in windows of LENGTH tokens that each begin without a context."""
    bits, num_bytes = 0.0, 0
    for document in documents:
        if document.is_chat:
            continue
        num_bytes += document.num_bytes
        for start in range(0, len(document.tokens) - 1, LENGTH):
            window = torch.from_numpy(document.tokens[start : start + LENGTH + 1].astype(np.int64))[None]
            padded = F.pad(window[:, :-1], (0, -(window.shape[1] - 1) % CHUNK))
            logits = model.main(padded).logits[:, : window.shape[1] - 1]
            bits += F.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item() / math.log(2)
    return bits / num_bytes


# -- the files ---------------------------------------------------------------------------------------------------------


def export(model: SmallModel, config: Qwen3_5TextConfig, out: Path) -> int:
    """config.json, generation_config.json and bfloat16 weights. Returns the bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    raw = config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16", "use_cache": True}
    raw["mtp_num_hidden_layers"] = 1
    (out / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    generation = {"eos_token_id": config.eos_token_id, "temperature": 0.6, "top_p": 0.95, "do_sample": True}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {
        name: weight.detach().to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, weight in model.stored().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return (out / "model.safetensors").stat().st_size


def plot(curve: Curve, path: Path) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cairn"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for label, values in (("next token", curve.next_token), ("token after it (MTP)", curve.token_after)):
        axes.plot(curve.steps, values, label=label, linewidth=0.8)
    axes.set_xlabel(f"step ({BATCH * LENGTH:,} tokens each)")
    axes.set_ylabel("cross entropy, nats a token")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/small-model"), help="where training is kept")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parsed = parser.parse_args()
    console = Console(stderr=True)
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(parsed.seed)
    parsed.work.mkdir(parents=True, exist_ok=True)
    parsed.out.mkdir(parents=True, exist_ok=True)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_delta_rule
    modeling_qwen3_5.causal_conv1d_fn = causal_conv

    ids = make_tokenizer(parsed.out, VOCAB_SIZE, MAX_POSITIONS)
    train_on, held_out = read_documents(Tokenizer.from_file(str(parsed.out / "tokenizer.json")))
    num_tokens = sum(len(document.tokens) for document in train_on)
    config = model_config(ids[END_OF_MESSAGE], ids[END_OF_TEXT])
    model = SmallModel(config)
    num_weights = sum(weight.numel() for weight in model.stored().values())
    print(f"{num_weights:,} weights, {num_tokens:,} tokens in {len(train_on)} documents, {len(held_out)} held out")
    curve = train(model, Batches(train_on, parsed.seed), parsed.work, parsed.steps, parsed.peak, console)
    stored_bytes = export(model, config, parsed.out)
    report = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "seed": parsed.seed,
        "threads": parsed.threads,
        "compiled": shutil.which("g++") is not None,
        "steps": parsed.steps,
        "tokens_a_step": BATCH * LENGTH,
        "tokens_of_corpus": num_tokens,
        "weights": num_weights,
        "weight_bytes": stored_bytes,
        "seconds": round(curve.seconds),
        "bits_per_byte_held_out": round(bits_per_byte(model.eval(), held_out), 4),
        "held_out": [document.name for document in held_out],
        "curve": asdict(curve),
    }
    (parsed.out / "training.json").write_text(json.dumps(report) + "\n")
    plot(curve, parsed.out / "training.svg")
    print(json.dumps({name: value for name, value in report.items() if name not in ("curve", "held_out")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
