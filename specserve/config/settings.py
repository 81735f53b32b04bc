"""Every setting of the server, declared once: the command line, the environment, the YAML file, the reference and
/server_info derive from these fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specserve.config import checks
from specserve.config.choices import CALL_FORMATS, DUMMY, LOADERS, REASONING_FORMATS
from specserve.config.declare import check_value, setting, settings_of
from specserve.config.notes import CHOSEN, UNUSED, Notes
from specserve.methods import ELSEWHERE, MAX_NODES, METHOD_NAMES, NONE, Method, method_of, names_where

GROUPS = MODEL, SERVER, ENGINE, SPECULATION = "Model", "Server", "Engine", "Speculation"
model, server, engine, speculation = (partial(setting, group) for group in GROUPS)
MAX_SLOTS = 65536  # limit of the attention kernels
FP8_KV = "fp8_e4m3"
ROUNDED = ("fp8", "int8", "int4")  # formats that weights can be quantized to at load
_BUNDLED = names_where(lambda m: m.bundled is not None and not m.has_one_shape and m.copies == "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings as given. ``resolve`` returns a copy in which every automatic choice is made.

    Raises ValueError naming the setting when a value is out of range.
    """

    model_path: str | None = model(
        None,
        "Directory of the model in Hugging Face format, or its id on the hub. Default: the bundled model.",
        aliases=("model",),
    )
    revision: str | None = model(
        None, "Branch, tag or commit of the model on the hub. Default: its main branch."
    )
    download_dir: str | None = model(None, "Directory for the hub's files. Default: the hub's own (HF_HOME).")
    tokenizer_path: str | None = model(None, "Directory or hub id of the tokenizer. Default: the model's.")
    chat_template: str | None = model(None, "Jinja chat template to use: a file, or the text itself.")
    skip_tokenizer_init: bool = model(False, "Load no tokenizer: completions are of token ids, without chat.")
    trust_remote_code: bool = model(
        False,
        "Run the tokenizer code that comes with a checkpoint. Model code that comes with one is never run.",
    )
    served_model_name: tuple[str, ...] = model(
        (),
        "Names that requests may use as `model`, with or without an organisation. Default: the last part of the model "
        "path; for a model of the hub also its id; for the bundled model `specserve-chat`.",
        check=checks.once,
    )
    context_length: int | None = model(
        None,
        "Maximum length of prompt plus answer, in tokens. Default: the model's max_position_embeddings, times the "
        "factor of a scaled rope.",
        low=2,
    )
    load_format: str = model(
        "auto",
        "auto: read weights from the checkpoint's files. dummy: draw random weights from config.json alone, for model "
        "and draft, for benchmarks of a shape; texts mean nothing.",
        choices=("auto", DUMMY),
        foreign=LOADERS,
    )
    dtype: str = model(
        "auto",
        "Type of weights and activations. auto: float32 on cpu; on cuda the checkpoint's own, or bfloat16 for "
        "float32.",
        choices=("auto", "bfloat16", "float16", "float32", "float64"),
        synonyms={
            "half": "float16",
            "fp16": "float16",
            "bf16": "bfloat16",
            "float": "float32",
            "fp32": "float32",
        },
    )
    quantization: str = model(
        "none",
        "Quantize a checkpoint of 16 or 32 bits to 8 or 4 bits when it is loaded. fp8 and int8 have a scale for each "
        "output, int4 one for each 128 inputs. Only projections are quantized, not embedding and head; with fp8, the "
        "projections' inputs are too. On a GPU a step then reads half or a quarter of the bytes; on a CPU, and in "
        "float64, no memory is saved. none: weights as the checkpoint stores them. A quantized checkpoint needs no "
        "flag and is refused if the flag names another format.",
        choices=("none", *ROUNDED, "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "fbgemm_fp8"),
        synonyms={
            **dict.fromkeys(("modelopt_fp8", "modelopt_fp4", "modelopt_mixed"), "modelopt"),
            **{"awq_marlin": "awq", "gptq_marlin": "gptq"},
        },
    )

    sampling_defaults: str = model(
        "model",
        "Sampling values of requests that don't set them. model: temperature, top_k, top_p, min_p, repetition_penalty "
        "and max_new_tokens (for max_tokens) of the checkpoint's generation_config.json; do_sample false means "
        "temperature 0. openai: those of OpenAI's API, whatever the checkpoint says.",
        choices=("model", "openai"),
    )

    tool_call_parser: str = server(
        "auto",
        "How the model writes tool calls. auto: as its chat template says, if that is one known format. none: `tools` "
        "is refused. qwen, qwen25 and qwen3 are other names of hermes, llama3 of llama3_json; other names of one model "
        "mean the same.",
        choices=("auto", "none", *CALL_FORMATS),
    )
    reasoning_parser: str = server(
        "auto",
        "How the model marks its reasoning, which chat then returns as `reasoning_content`. auto: gpt-oss for the chat "
        "template of that model, whose answers can't be read otherwise, none for any other. gemma4: between "
        "`<|channel>thought` and `<channel|>`. gpt-oss: in the channel `analysis`. All others mean the same: between "
        "`<think>` and `</think>`. The opening mark may be the end of the prompt. none: reasoning is part of the "
        "content.",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    host: str = server("127.0.0.1", "Address to listen on.")
    port: int = server(30000, "Port to listen on; 0 takes any free port.", low=0, high=65535)
    api_key: tuple[str, ...] | None = server(
        None,
        "Keys, one of which requests must carry as `Authorization: Bearer KEY` or `x-api-key: KEY`. NAME=KEY names one "
        "for /metrics, which counts the usage of several. /health, /live, /metrics and the playground need none.",
        secret=True,
        check=checks.sendable,
    )
    log_level: str = server(
        "info",
        "Least severe level that is logged.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_format: str = server(
        "text",
        "Format of the log: lines of text, or JSON objects with time, level, module, message and, while a request is "
        "answered, request_id.",
        choices=("text", "json"),
    )
    otlp_traces_endpoint: str | None = server(
        None,
        "Collector of OpenTelemetry spans, one of each call that generates: grpc://HOST:4317, or, over HTTP, "
        "http://HOST:4318/v1/traces. Needs `pip install 'specserve[otlp]'`.",
        check=checks.collector,
    )
    cors_origin: tuple[str, ...] = server(
        (),
        "Origins whose pages may call this server from a browser, `*` for any. Default: none.",
        check=checks.origins,
    )
    max_queued_requests: int = server(
        2048,
        "Answers that may wait beyond max_running_requests; further requests get 429. 0: none may wait.",
        low=0,
    )
    unknown_fields: str = server(
        "refuse", "Refuse requests with unknown fields, or log and ignore these.", choices=("refuse", "log")
    )
    request_timeout: float | None = server(
        None, "Seconds from a request's tokenized prompt until it is answered 504.", low=0.001, high=1e9
    )
    max_body_bytes: int = server(16 * 2**20, "Largest request body, in bytes; a larger one gets 413.", low=1)
    timeout_keep_alive: int = server(
        120,
        "Seconds that a connection stays open after an answer: longer than load balancers and clients keep it.",
        low=1,
        high=10**9,
    )
    drain_timeout: float = server(
        60.0, "Seconds that running requests have to finish when the server is told to stop.", low=0, high=1e9
    )
    watchdog_timeout: float | None = server(
        None,
        "Seconds after which an engine that says nothing while it has requests is replaced, like one that died. After "
        "a tenth of them `/health` and new requests get 503. Raise it if a single launch takes so long. Default: 300 "
        "on a GPU, 3000 on a CPU.",
        low=1,
        high=1e9,
    )
    engine_restarts: int = server(
        3,
        "How often an engine that died is replaced within 10 minutes, and how many in a row may die while they load. "
        "After that, and if the first engine never served, the server exits with code 1.",
        low=0,
    )
    token_statistics: bool = server(
        False,
        "Count generated tokens by id, at /token_statistics, for `python -m specserve.token_map`. The counts reveal "
        "something about what users' answers say.",
    )
    disable_log_requests: bool = server(
        False, "Don't log a line for each call. Lines hold no content; probes and successful GETs have none."
    )
    requests_all_greedy: bool = server(False, "Default temperature 0, and refuse any other.")

    device: str = engine(
        "auto",
        "Where the model runs. auto: cuda if there is a GPU, otherwise cpu.",
        choices=("auto", "cuda", "cpu"),
    )
    cpu_threads: int | None = engine(
        None,
        "Threads of the engine on a CPU. Default: the number that makes a step fastest, measured at start, within the "
        "cores that process, container and OMP_NUM_THREADS allow; the server leaves one core to its front. With "
        "several ranks, threads of each. Set it to get the same rounding at every start.",
        low=1,
        check=checks.cores,
    )
    attention_backend: str = engine(
        "auto",
        "Attention implementation. auto: triton on cuda (torch for float64 and for head sizes other than 32, 64, 128 "
        "and 256), torch on cpu.",
        choices=("auto", "torch", "triton", "flashinfer"),
        synonyms={"triton_attn": "triton", "torch_native": "torch"},
        foreign=(
            *("fa3", "fa4", "flash_attn", "trtllm_mha", "flex_attention", "aiter", "wave"),
            *("flashmla", "cutlass_mla", "trtllm_mla"),
        ),
    )
    kv_cache_dtype: str = engine(
        "auto",
        "Type of the KV cache, of model and draft. fp8_e4m3 (or fp8): float8_e4m3fn, with the checkpoint's scales or "
        "1, in half the memory of 16 bits. Texts differ from those with 16 bits, but not between drafts and none. A "
        "GPU needs compute capability 8.9. auto: that of --dtype, as any other type must be.",
        choices=("auto", "bfloat16", "float16", "float32", "float64", FP8_KV),
        synonyms={"fp8": FP8_KV, "bf16": "bfloat16", "half": "float16"},
        refused={
            "fp8_e5m2": f"it has a mantissa bit less than {FP8_KV}, for a range that keys and values do not need; "
            f"use {FP8_KV}"
        },
    )
    mamba_ssm_dtype: str = engine(
        "auto",
        "Type of the states of layers that keep one instead of keys and values. bfloat16 takes half the memory, and "
        "texts differ from those with float32, but not between drafts and none. auto: float32, float64 with it.",
        choices=("auto", "float32", "bfloat16"),
        synonyms={"bf16": "bfloat16"},
        aliases=("mamba_ssm_cache_dtype",),
    )
    max_mamba_cache_size: int | None = engine(
        None,
        "States that are held: one for each running request, the others for cached prefixes. Default: what "
        "mamba_full_memory_ratio allows.",
        low=2,
    )
    mamba_full_memory_ratio: float = engine(
        0.5, "Memory of the states of cached prefixes, in relation to that of the KV pool.", low=0.01
    )
    max_running_requests: int | None = engine(
        None,
        "Maximum number of requests in a batch. Default: 16 on cpu, 256 on cuda; where layers keep states, at most "
        "half of max_mamba_cache_size, or what half of a GPU's memory next to the weights holds.",
        low=1,
        high=MAX_SLOTS,
    )
    max_total_tokens: int | None = engine(
        None,
        "Tokens that the KV pool holds. Default: what mem_fraction_static allows, on cpu at most the larger of 65536 "
        "and 4 contexts.",
        low=1,
    )
    mem_fraction_static: float = engine(
        0.85,
        "Share of the GPU's memory for weights and KV pool. On a CPU: of the memory that is free once the weights are "
        "loaded, within the container's limit, for the pool alone.",
        aliases=("mem_fraction",),
        low=0.01,
        high=1,
    )
    page_size: int = engine(16, "Tokens in a page of the KV pool; a power of two.", check=checks.page)
    chunked_prefill_size: int | None = engine(
        None,
        "Maximum number of prompt tokens computed in one iteration; -1 computes prompts whole. Default: 512 on cpu, "
        "8192 on cuda.",
        check=checks.only("-1 or at least 1", lambda size: size == -1 or size >= 1),
    )
    max_prefill_tokens_per_step: int | None = engine(
        None,
        "Maximum number of prompt tokens computed between two steps of other requests. Lower values make their tokens "
        "come more evenly, but reduce the total throughput. Default: --chunked-prefill-size.",
        low=1,
    )
    disable_radix_cache: bool = engine(
        False, "Discard a prompt's KV cache when its request ends.", aliases=("disable_radix",)
    )
    disable_hybrid_kv_cache_manager: bool = engine(
        False,
        "Keep the KV cache of all tokens in layers with a sliding window too. The text stays the same.",
        aliases=("disable_hybrid_swa_memory",),
    )
    overlap_schedule: str = engine(
        "auto",
        "Do the host's work for one step during the next. auto: on for cuda; off on cpu, where there is nothing to "
        "overlap with.",
        choices=("auto", "on", "off"),
    )
    disable_overlap_schedule: bool = engine(False, "The same as `--overlap-schedule off`.")
    disable_cuda_graph: bool = engine(
        False, "Run steps eagerly, with the same functions, instead of as CUDA graphs."
    )
    cuda_graph_max_bs: int | None = engine(
        None, "Largest batch that gets a CUDA graph. Default: max_running_requests.", low=1
    )
    enable_deterministic_inference: bool = engine(
        False,
        "Give a request the same bits whatever else is in its batch, with drafts and without. Always on in bfloat16 "
        "on a GPU with the attention backend triton; refused elsewhere.",
    )
    enable_torch_compile: bool = engine(False, "Accepted for SGLang's commands; has no effect.")
    torch_compile_max_bs: int | None = engine(None, "The same.", low=1)
    tensor_parallel_size: int = engine(
        1,
        "Ranks: processes that share every weight, each with some heads, channels and tokens of the vocabulary. Heads "
        "and channels must be multiples of it. One GPU each, or all on a CPU.",
        aliases=("tp_size", "tp"),
        low=1,
        high=64,
    )
    expert_parallel_size: int = engine(
        1,
        "Groups of ranks, each with as many whole experts, whose channels its ranks share. Must divide "
        "tensor_parallel_size, and the number of experts be a multiple of it.",
        aliases=("ep_size", "ep"),
        low=1,
        high=64,
    )
    enable_expert_parallel: bool = engine(
        False, "expert_parallel_size is tensor_parallel_size.", aliases=("enable_ep_moe", "enable_deepep_moe")
    )
    dist_timeout: float = engine(
        4.0,
        "Seconds for which a rank that serves waits for another, and the server for rank 0 if that is stopped, before "
        "the engine ends. Time in which the whole group is stopped does not count, nor does loading.",
        aliases=("distributed_timeout_seconds",),
        low=1,
        high=1e9,
    )
    random_seed: int | None = engine(
        None,
        "Seed from which requests without a `seed` get theirs. Default: a new one at each start; it is logged.",
        low=0,
        high=2**63 - 1,
    )

    speculative_algorithm: str = speculation(
        NONE,
        "Drafting method; NONE is plain decoding.",
        choices=METHOD_NAMES,
        refused=dict.fromkeys(
            ("eagle2", "eagle-2", "eagle_2"), "EAGLE-2's drafts and trees are those of EAGLE; use EAGLE"
        ),
        synonyms=ELSEWHERE,
        aliases=("speculative_algo",),
    )
    speculative_draft_model_path: str | None = speculation(
        None,
        "Directory or hub id of the draft. Default: the draft in the model's own checkpoint, if it has one; for the "
        f"bundled model its own for {', '.join(_BUNDLED)}, alone or with a lookup.",
        aliases=("speculative_draft_model",),
    )
    speculative_draft_model_revision: str | None = speculation(
        None, "Branch, tag or commit of the draft's repository on the hub. Default: its main branch."
    )
    speculative_num_steps: int | None = speculation(
        None, "Draft levels. Give all three numbers of the shape or none.", low=1, high=MAX_NODES - 1
    )
    speculative_eagle_topk: int | None = speculation(
        None, "Candidates of each draft node; 1 drafts a chain.", low=1, high=MAX_NODES
    )
    speculative_num_draft_tokens: int | None = speculation(
        None,
        "Nodes that a step verifies for each request, the root included. Without the three numbers, the controller "
        "chooses each step's shape.",
        low=2,
        high=MAX_NODES,
    )
    speculative_adaptive: bool | None = speculation(
        None,
        "Choose each step's shape, plain decoding included, by measured cost and acceptance. Default: true unless the "
        "three numbers are given. true with the three numbers is an error; false without them means (3, 1, 4).",
    )
    speculative_max_slowdown: float | None = speculation(
        1.1,
        "Most time that any request's recent steps may take, as a ratio to plain decoding's for as many tokens: those "
        "whose drafts miss also wait for the drafts of others. none: only all requests together count.",
        low=1,
        has_none=True,
    )
    speculative_synthetic_acceptance: str | None = speculation(
        None,
        "For benchmarks alone: draw whether drafts are accepted, so that the text is wrong. One number from 1 on: mean "
        "tokens a step, rounded down or up in each, with a fixed chain. Numbers from 0 to 1, separated by commas: the "
        "probability of each level's first guess after the one above it; deeper levels have the last one's.",
        aliases=("synthetic_acceptance_length",),
        check=checks.acceptance,
        takes_numbers=True,
    )
    speculative_token_map: str | None = speculation(
        None,
        "Tokens that the draft may guess (FR-Spec): a file of target token ids, `org/name/file` of the hub, or "
        "`dynamic`, which takes those of running requests and those generated recently. A file works with drafts that "
        "use the target's head. EAGLE3 refuses it, because its heads have a vocabulary of their own; `dynamic` "
        "chooses from that. Default: all tokens that the draft scores.",
    )
    speculative_token_map_size: int | None = speculation(
        None,
        "Tokens in a dynamic map. Default: a quarter of those that the draft scores, but at least 1024 (or all) and at "
        "most 32768.",
        low=1,
    )
    speculative_token_map_interval: int | None = speculation(
        None,
        "Steps between two checks whether a dynamic map should change; new requests also cause one. Default: 8.",
        low=1,
    )
    speculative_token_map_start: str | None = speculation(
        None,
        "Map that a dynamic one starts from: a file or `org/name/file` of the hub, the most frequent tokens first. "
        "Default: the lowest ids.",
    )
    speculative_suffix_cache_tokens: int | None = speculation(
        None,
        "Tokens of earlier answers that SUFFIX keeps to propose from, at 24 bytes of host memory each; the oldest are "
        "dropped first. Answers to one API key are never proposed to another. `/flush_cache` clears them. 0: propose "
        "only from the request's own text. Default: 1048576.",
        low=0,
        high=2**30,
    )
    speculative_datastore: str | None = speculation(
        None,
        "File of texts that REST proposes from, the same for all API keys: one that `python -m specserve.datastore` or "
        "REST's own tools wrote with this model's tokenizer, or `org/name/file` of the hub. The file is memory-mapped. "
        "To replace it, rename a new file over it; truncating it in place crashes the engine.",
    )
    speculative_lookahead_window: int | None = speculation(
        None,
        "Columns of LOOKAHEAD's window (W), the last token's included. (N - 1) * (W + G) is at most 64. Default: 7.",
        low=1,
        high=MAX_NODES - 1,
    )
    speculative_lookahead_ngram: int | None = speculation(
        None,
        "Tokens of LOOKAHEAD's n-grams (N), the one they begin with included; the window has N - 1 generations. "
        "Default: 5.",
        low=2,
        high=MAX_NODES // 2 + 1,
    )
    speculative_lookahead_guesses: int | None = speculation(
        None,
        "N-grams that LOOKAHEAD verifies for each request and step (G). Default: 7.",
        low=1,
        high=MAX_NODES - 1,
    )
    speculative_draft_config_override: str | None = speculation(
        None,
        "JSON object of fields that replace those of the draft's config.json, among them rope_theta, rope_scaling, "
        "eagle_aux_hidden_state_layer_ids (the layers whose input is read, whatever the file's convention), "
        "use_own_embedding, norm_before_residual, recycled_hidden and mtp_hidden (pre or post a norm). Each choice "
        "and its reason is logged at start.",
        check=checks.json_object,
    )
    speculative_draft_quantization: str = speculation(
        "auto",
        "Quantize the draft's weights to 8 bits, with a scale for each 128 inputs; this changes the drafts, never the "
        "text. int8 is more exact and quantizes inputs too; fp8 needs compute capability 8.9. On a GPU, "
        "passes of up to 128 tokens (32 with fp8, or int8 in float32) then read half the bytes, from copies next to "
        "the weights; elsewhere nothing is saved. auto: int8 on a GPU in 16 bits, otherwise none.",
        choices=("auto", "none", "int8", "fp8"),
    )

    speculative_accept_threshold_single: float = speculation(
        1.0, "Must be 1: a draft is accepted only if it is what the model chose.", check=checks.lossless
    )
    speculative_accept_threshold_acc: float = speculation(
        1.0, "Must be 1, for the same reason.", check=checks.lossless
    )

    def __post_init__(self) -> None:
        for name, declared in SETTINGS.items():
            if (value := getattr(self, name)) is not declared.default:  # a default is valid
                check_value(declared, value, declared.flag)
        if self.disable_overlap_schedule and self.overlap_schedule == "on":
            raise ValueError("--disable-overlap-schedule contradicts --overlap-schedule on")

    @property
    def method(self) -> Method | None:
        """Return the drafting method, None for plain decoding."""
        return method_of(self.speculative_algorithm)

    def public(self) -> dict[str, Any]:
        """Return every setting and its value; secrets show only whether they are set."""
        values = {name: getattr(self, name) for name in SETTINGS}
        secrets = {
            name for name, declared in SETTINGS.items() if declared.secret and values[name] is not None
        }
        return values | dict.fromkeys(secrets, "(set)")

    def choose(self, name: str, value: Any, why: str, notes: Notes) -> Settings:
        """Return a copy with an automatic choice, and note it."""
        notes[f"{name} = {value}: {why}"] = CHOSEN
        return replace(self, **{name: value})

    def without(self, names: Iterable[str], why: str, notes: Notes) -> Settings:
        """Return a copy in which ``names`` have their defaults, and note which of them had been given."""
        given = {n: SETTINGS[n].default for n in names if getattr(self, n) != SETTINGS[n].default}
        if given:
            notes[f"{', '.join(SETTINGS[name].flag for name in given)} has no effect{why}"] = UNUSED
        return replace(self, **given)  # type: ignore[arg-type]


SETTINGS = settings_of(Settings)
