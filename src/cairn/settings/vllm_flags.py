"""Flags of `vllm serve` that are no setting here: what is true of cairn anyway may be said, everything else is refused.

One table, the one of docs/flags.md: each row has flags with one reason. What is accepted changes nothing.
"""

import json
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from cairn.errors import ConfigError

_DEST = "flags_without_effect"
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """Flags of vLLM's that are true or untrue here for one reason. `names`: with their short forms, between blanks.
    `values`: those that may be given, between blanks (of a switch `on` and `off`); None: any, "": none. `form`: a
    switch with its `--no-` form, a flag with a value, or one with several."""

    names: str
    values: str | None
    why: str
    form: Literal["switch", "value", "values"] = "value"

    def check(self, name: str, given: str, where: str = "") -> None:
        """Raises ConfigError unless `given` may be said. `where` stands before the flag's name."""
        if self.values is None or _plain(given) in map(_plain, self.values.split()):
            return
        if not self.values:
            raise ConfigError(f"{where}{name} is not supported: {self.why}")
        known = " or ".join(self.values.split())
        shown = f"must be {known}, not {given[:_SHOWN]!r}"
        if self.form == "switch":
            name, shown = (name if given == "on" else name.replace("--", "--no-", 1)), "is not supported"
            raise ConfigError(f"{where}{name} {shown}: {self.why}")
        raise ConfigError(f"{where}{name}: {shown}: {self.why}")


_switches, _lists = partial(VllmFlags, form="switch"), partial(VllmFlags, form="values")

VLLM_FLAGS: tuple[VllmFlags, ...] = (
    # -- how it computes -----------------------------------------------------------------------------------------------
    _switches(
        "--cudagraph-metrics --sleep-mode-offload-cudagraph", None, "there are no metrics of graphs, and no sleep mode"
    ),
    VllmFlags(
        "--compilation-config -cc --optimization-level -O --performance-mode --jit-monitor-mode",
        None,
        "nothing is compiled for a model; CUDA graphs have flags of their own",
    ),
    _switches("--jit-monitor-verbose", None, "nothing is compiled for a model"),
    VllmFlags(
        "--attention-config -ac --mamba-backend --mamba-ssu-algorithm --moe-backend "
        "--linear-backend --kda-prefill-backend --kda-decode-backend "
        "--sparse-indexer-topk-backend --kernel-config --ir-op-priority",
        None,
        "a machine has one set of kernels",
    ),
    _switches(
        "--enable-flashinfer-autotune --monokernel --use-fp64-gumbel --disable-cascade-attn "
        "--disable-custom-all-reduce",
        None,
        "a machine has one set of kernels",
    ),
    VllmFlags("--device-memory-utilization", "", "a GPU's share is `--gpu-memory-utilization`"),
    VllmFlags("--num-gpu-blocks-override", "", "the pool is sized by `--kv-cache-memory-bytes`"),
    VllmFlags("--swap-space", None, "nothing is swapped: requests that are preempted are computed again"),
    # -- scheduling ----------------------------------------------------------------------------------------------------
    _switches("--enable-chunked-prefill", "on", "prompts are computed in as many steps as they need"),
    _switches("--async-scheduling", "on", "a step is planned while the one before it is computed"),
    _switches("--disable-chunked-mm-input", None, "an image is encoded as a whole"),
    _switches("--long-prefill-token-threshold-adaptive", "off", "long prompts are not held back"),
    VllmFlags("--long-prefill-token-threshold", "0", "long prompts are not held back"),
    _switches(
        "--scheduler-reserve-full-isl", None, "a request starts when there is room for it, and is preempted otherwise"
    ),
    VllmFlags("--max-num-scheduled-tokens", "", "a step is bounded by `--max-num-batched-tokens`"),
    VllmFlags("--max-num-active-seqs", "", "running requests are bounded by `--max-num-seqs`"),
    VllmFlags(
        "--max-num-queued-reqs", "", "the queue is bounded by `--max-waiting`, which does not count running ones"
    ),
    VllmFlags("--max-num-queued-tokens", "", "the queue is bounded in requests, by `--max-waiting`"),
    VllmFlags("--prefill-schedule-interval", "1", "each step may have prefill"),
    VllmFlags("--num-scheduler-steps --max-num-partial-prefills", "1", "one step is planned at a time"),
    VllmFlags("--watermark", "0 0.0", "no pages are kept free"),
    VllmFlags("--scheduler-cls", "", "no other code is loaded"),
    # -- cache ---------------------------------------------------------------------------------------------------------
    VllmFlags("--kv-cache-dtype", "auto", "keys and values have `--dtype`"),
    _lists("--kv-cache-dtype-skip-layers", "", "keys and values have `--dtype`"),
    VllmFlags("--mamba-cache-dtype", "auto", "the last inputs of convolutions have `--dtype`"),
    VllmFlags("--mamba-cache-philox-rounds", None, "recurrent states are rounded to the nearest number"),
    _switches("--enable-mamba-cache-stochastic-rounding", "off", "recurrent states are rounded to the nearest number"),
    _switches("--disable-hybrid-kv-cache-manager", "off", "the cache is always a hybrid one"),
    VllmFlags("--prefix-caching-hash-algo --mm-hasher-algorithm", None, "there is one hash for pages, one for images"),
    VllmFlags(
        "--mamba-block-size --prefix-match-unit --prefix-cache-retention-interval",
        "",
        "where state checkpoints are kept is `--mamba-cache-mode`, their stride `--block-size`",
    ),
    _switches(
        "--enable-mamba-shared-prefix-checkpoint", "off", "where state checkpoints are kept is `--mamba-cache-mode`"
    ),
    _switches("--use-replayssm --swa-bounded-replay", "off", "states come from checkpoints alone"),
    VllmFlags("--replayssm-buffer-len", None, "states come from checkpoints alone"),
    _switches("--kv-sharing-fast-prefill", "off", "no layer shares another one's keys and values"),
    VllmFlags(
        "--kv-offloading-size --kv-offloading-backend", "", "below the pool are `--host-cache-bytes` and `--disk-cache`"
    ),
    VllmFlags("--cpu-offload-gb --offload-group-size", "0", "weights are not offloaded"),
    VllmFlags("--offload-backend --offload-num-in-group --offload-prefetch-step", "", "weights are not offloaded"),
    _lists("--cpu-offload-params --offload-params", "", "weights are not offloaded"),
    # -- processes and machines ----------------------------------------------------------------------------------------
    VllmFlags(
        "--pipeline-parallel-size -pp --data-parallel-size -dp --data-parallel-size-local -dpl "
        "--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --nnodes -n --api-server-count -asc "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --renderer-num-workers",
        "1",
        "one engine on one machine; heads are divided with `--tensor-parallel-size`",
    ),
    VllmFlags(
        "--node-rank -r --data-parallel-rank -dpn --data-parallel-start-rank -dpr --ubatch-size",
        "0",
        "one engine on one machine",
    ),
    VllmFlags("--distributed-executor-backend --data-parallel-backend -dpb", "mp uni", "ranks are processes"),
    VllmFlags(
        "--master-addr --master-port --distributed-timeout-seconds --cpu-distributed-timeout-seconds "
        "--data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-supervisor-port "
        "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold "
        "--dp-sync-interval --all2all-backend --dcp-comm-backend --dbo-decode-token-threshold "
        "--dbo-prefill-token-threshold --max-parallel-loading-workers",
        None,
        "one engine on one machine",
    ),
    _switches(
        "--disable-nccl-for-dp-synchronization --aggregate-engine-logging --disable-frontend-multiprocessing",
        None,
        "one engine on one machine",
    ),
    _switches(
        "--enable-expert-parallel -ep", None, "each rank has its share of every expert, and answers are the same"
    ),
    _switches(
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm "
        "--headless --enable-eplb --enable-ep-weight-filter --enable-elastic-ep "
        "--enable-dbo --enable-hc-sp --dcp-q-replicate --enable-batch-sharded-sampling --enable-shm-tensor-arena "
        "--enable-fault-tolerance --ray-workers-use-nsight --numa-bind",
        "off",
        "one engine on one machine; heads are divided with `--tensor-parallel-size`",
    ),
    VllmFlags(
        "--eplb-config --expert-placement-strategy --elastic-ep-max-dp-size --fault-tolerance-config --device-ids",
        "",
        "one engine on one machine; heads are divided with `--tensor-parallel-size`",
    ),
    _lists("--numa-bind-nodes --numa-bind-cpus", "", "threads are `--cpu-threads`; use numactl"),
    VllmFlags("--worker-cls", "auto", "no other code is loaded"),
    # -- the checkpoint ------------------------------------------------------------------------------------------------
    _switches("--trust-remote-code", None, "code that comes with a checkpoint is never run"),
    VllmFlags("--code-revision", None, "code that comes with a checkpoint is never run"),
    VllmFlags("--load-format", "auto safetensors", "weights are read from safetensors alone"),
    VllmFlags(
        "--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--pt-load-map-location --ignore-patterns",
        None,
        "of a checkpoint only safetensors, configuration and tokenizer are read, one tensor after another",
    ),
    _switches("--use-tqdm-on-load --allow-deprecated-quantization", None, "how weights are read changes nothing"),
    VllmFlags("--model-loader-extra-config --additional-config --hf-overrides", "{}", "config.json is served as it is"),
    VllmFlags("--hf-config-path --model-class-overrides --quantization-config", "", "config.json is served as it is"),
    VllmFlags("--hf-token", "", "others can see flags: set HF_TOKEN, or use `hf auth login`"),
    VllmFlags("--config-format", "auto hf", "config.json is read"),
    VllmFlags("--tokenizer-mode", "auto hf", "tokenizer.json is read"),
    VllmFlags("--model-impl", "auto vllm", "models are cairn's own"),
    VllmFlags("--runner --task", "auto generate", "models generate text"),
    VllmFlags("--convert", "auto none", "models generate text"),
    VllmFlags("--pooler-config --io-processor-plugin", "", "models generate text: there is no pooling"),
    _switches("--enable-flash-late-interaction", None, "models generate text: there is no pooling"),
    _switches("--skip-tokenizer-init", "off", "prompts and answers are text"),
    _switches("--disable-sliding-window", "off", "a model's attention is as in config.json"),
    VllmFlags("--rope-scaling --rope-theta", "", "config.json is served as it is"),
    # -- images --------------------------------------------------------------------------------------------------------
    VllmFlags("--allowed-local-media-path", "", "images are never read from files; send data URIs"),
    VllmFlags(
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-tensor-ipc "
        "--mm-ipc-gpu-memory-gb",
        None,
        "encoded images are kept, `--mm-encoder-cache-bytes` of them",
    ),
    VllmFlags(
        "--mm-encoder-tp-mode --mm-encoder-attn-backend --video-pruning-rate --video-pruning-method",
        None,
        "each rank has the whole vision model, and there are no videos",
    ),
    VllmFlags("--mm-processor-device", "auto cpu", "images are prepared on the CPU"),
    _switches("--skip-mm-profiling --mm-device-do-normalize --interleave-mm-strings", None, "how images are prepared"),
    _switches("--mm-encoder-only --enable-mm-embeds", "off", "images are images, and models answer"),
    VllmFlags("--media-io-kwargs --mm-processor-kwargs", "{}", "images are prepared as the checkpoint says"),
    _switches("--trust-request-mm-kwargs", None, "`mm_processor_kwargs` of requests are bounded, and always taken"),
    VllmFlags(
        "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
        "--mm-encoder-fp8-scale-save-margin",
        "",
        "the vision model has `--dtype`",
    ),
    # -- HTTP ----------------------------------------------------------------------------------------------------------
    _switches("--enable-server-load-tracking", None, "`/load` is always there"),
    VllmFlags("--sse-keep-alive-interval", "0", "a stream has no comments"),
    VllmFlags("--response-role", "assistant", "answers are the assistant's"),
    VllmFlags("--chat-template-content-format", "auto", "templates get texts as texts and parts as parts"),
    VllmFlags("--fingerprint-mode", "full hash", "`system_fingerprint` is version and hash"),
    VllmFlags("--fingerprint-value", "", "`system_fingerprint` is version and hash"),
    VllmFlags("--tool-strict-level", "auto", "a tool's `strict` decides"),
    _switches("--exclude-tools-when-tool-choice-none", "off", "the template gets a request's tools in any case"),
    VllmFlags("--anthropic-disabled-thinking-effort", "auto", "`thinking` is one of the template's switches"),
    VllmFlags("--reasoning-effort-map --reasoning-config", "", "templates read `reasoning_effort` as it is sent"),
    VllmFlags("--cohere-format", None, "there is no `/cohere`"),
    _switches("--cohere-is-reasoning-model", None, "there is no `/cohere`"),
    _switches("--grpc --tokens-only --enable-scale-out", "off", "there is HTTP with OpenAI's and Anthropic's APIs"),
    VllmFlags("--grpc-port --uds", "", "the server listens on `--host` and `--port`"),
    VllmFlags("--h11-max-incomplete-event-size --h11-max-header-count", "", "headers may have 32 KiB"),
    _switches("--enable-ssl-refresh", "off", "certificates are read at the start"),
    _switches("--enable-offline-docs", "off", "no scripts come with cairn; `--enable-docs` is there"),
    VllmFlags("--tool-server", "", "no other code is loaded or called"),
    VllmFlags(
        "--tool-parser-plugin --reasoning-parser-plugin",
        None,
        "no other code is loaded: parsers are those that `--tool-call-parser` and `--reasoning-parser` can name",
    ),
    _lists("--middleware --logits-processors --worker-extension-cls", "", "no other code is loaded or called"),
    VllmFlags(
        "--structured-outputs-config",
        '{} {"backend":"auto"} {"backend":"guidance"}',
        "grammars are llguidance's",
    ),
    VllmFlags("--guided-decoding-backend", "auto guidance", "grammars are llguidance's"),
    VllmFlags("--logprobs-mode", "raw_logprobs", "log-probabilities are the model's, before penalties and temperature"),
    _switches("--enable-reasoning", None, "`--reasoning-parser` decides"),
    # -- logs and metrics ----------------------------------------------------------------------------------------------
    _switches(
        "--enable-log-requests --enable-log-outputs",
        "off",
        "no texts are logged; `--request-log` writes what else there is of a request",
    ),
    _switches("--disable-log-requests", "on", "no texts are logged"),
    _switches("--enable-log-deltas", None, "no texts are logged"),
    VllmFlags("--max-log-len", None, "no texts are logged"),
    _switches("--disable-uvicorn-access-log", "on", "there is no log of accesses"),
    VllmFlags("--disable-access-log-for-endpoints", None, "there is no log of accesses"),
    _switches("--log-error-stack", None, "bugs are logged with their stack, refusals never"),
    VllmFlags("--logging-config --log-config-file", "", "there is `--log-level`, and one format"),
    VllmFlags("--show-hidden-metrics-for-version --kv-cache-metrics-sample", None, "there are no such metrics"),
    _switches(
        "--kv-cache-metrics --enable-mfu-metrics --enable-logging-iteration-details --enable-layerwise-nvtx-tracing",
        "off",
        "there are no such metrics",
    ),
    VllmFlags(
        "--custom-histogram-buckets --otlp-traces-endpoint", "", "there are the metrics of docs/metrics.md, no traces"
    ),
    _lists("--collect-detailed-traces", "", "there are the metrics of docs/metrics.md, no traces"),
    VllmFlags("--profiler-config --watchdog-config", "{}", "there is no profiler and no watchdog"),
    _switches("--fail-on-environ-validation", None, "no variables of vLLM's are read but those of this page"),
    # -- what there is not ---------------------------------------------------------------------------------------------
    _switches(
        "--enable-lora --enable-tower-connector-lora --fully-sharded-loras --specialize-active-lora "
        "--enable-mixed-moe-lora-format --enable-moe-shared-loras",
        "off",
        "there are no LoRA adapters",
    ),
    VllmFlags(
        "--max-loras --max-lora-rank --lora-dtype --max-cpu-loras --default-mm-loras --max-lora-cls-labels",
        None,
        "there are no LoRA adapters, and these alone ask for none",
    ),
    _lists("--lora-modules --lora-target-modules", "", "there are no LoRA adapters"),
    VllmFlags("--spec-method --spec-tokens", "", "`--speculative-config` says it"),
    VllmFlags("--spec-model", "", "there are no draft models"),
    VllmFlags("--per-request-spec-decode-metrics", "none", "`usage` has a request's drafts"),
    _switches("--enable-prompt-embeds", "off", "prompts are text or token ids"),
    _switches("--enable-return-routed-experts --return-sampling-mask", "off", "answers have tokens and probabilities"),
    _switches(
        "--enable-sleep-mode --enable-cumem-allocator --enable-nccl-comm-suspend --enable-trace-replay",
        "off",
        "a server serves until it ends",
    ),
    VllmFlags("--sleep-mode-backend", None, "a server serves until it ends"),
    _lists("--sleep-preserve-parameter-names", "", "a server serves until it ends"),
    VllmFlags(
        "--diffusion-config -dc --watermark-config --engram-config --aux-output-config --ec-manager-config "
        "--ec-transfer-config --weight-transfer-config",
        "",
        "there is no such thing here",
    ),
)


def add_vllm_flags(parser: ArgumentParser) -> None:
    """Give the parser the flags of the table; --help does not show them."""
    for row in VLLM_FLAGS:
        for names in _spellings(row):
            if row.form == "switch":
                negated = [name.replace("--", "--no-", 1) for name in names if name.startswith("--")]
                parser.add_argument(
                    *names, *negated, action=_Flag, nargs=0, dest=_DEST, default=SUPPRESS, help=SUPPRESS
                )
            else:
                nargs = "+" if row.form == "values" else None
                parser.add_argument(*names, action=_Flag, nargs=nargs, dest=_DEST, default=SUPPRESS, help=SUPPRESS)


def ignored_flags(parsed: Namespace) -> list[str]:
    """The flags of the table that were given."""
    return list(getattr(parsed, _DEST, ()))


def check_vllm_line(name: str, value: object, where: str) -> str | None:
    """The flag that a line of a file stands for; None if the table has none. `name`: with underscores. Raises
    ConfigError, which begins with `where`, for a value that may not be said."""
    flag = "--" + name.replace("_", "-")
    is_negated = flag.startswith("--no-") and flag not in _rows()
    row = _rows().get("--" + flag.removeprefix("--no-") if is_negated else flag)
    if row is None or (is_negated and row.form != "switch"):
        return None
    given = value if isinstance(value, str) else json.dumps(value)
    if row.form == "switch":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}{name}: must be true or false, not {given[:_SHOWN]!r}")
        given = "on" if value is not is_negated else "off"
    row.check("--" + flag.removeprefix("--no-") if is_negated else flag, given, where)
    return flag


class _Flag(Action):
    """Checks a flag of the table where it is read."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option: str | None = None,
    ) -> None:
        assert option is not None
        name = option if option in _rows() else option.replace("--no-", "--", 1)
        row = _rows()[name]
        if row.form == "switch":
            given = ["on" if name == option else "off"]
        else:
            given = [values] if isinstance(values, str) else [str(value) for value in values or ()]
        for value in given:
            row.check(name, value)
        setattr(namespace, _DEST, [*getattr(namespace, _DEST, ()), option])


@cache
def _rows() -> Mapping[str, VllmFlags]:
    return {name: row for row in VLLM_FLAGS for name in row.names.split()}


def _spellings(row: VllmFlags) -> Iterator[list[str]]:
    """Each flag of a row with the short forms that follow it."""
    names: list[str] = []
    for name in row.names.split():
        if name.startswith("--") and names:
            yield names
            names = []
        names.append(name)
    yield names


def _plain(value: str) -> str:
    """One way to write what JSON has several for."""
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except (ValueError, RecursionError):
        return value
