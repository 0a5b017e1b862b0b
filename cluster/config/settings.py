"""The settings of one cluster: `ClusterArgs`, the `args` of the application in deploy/cluster.yaml.

The values are frozen and made without I/O. An unknown name is refused, and the error names the nearest known
one. `resolution` fills in what depends on the machine.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.types.members import Phase, Role

# for an installed wheel: site-packages. `deploy` lies next to the packages in both cases
REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20


class _Args(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            for name in data:
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known)}"
                    raise ValueError(f'unknown setting "{name}"; {hint}')
        return data


class _PoolArgs(_Args):
    """Where a pool runs on CPUs. Replicas that share cores share CPU slots: cluster/worker/cpu_slots.py."""

    threads: int = Field(default=0, ge=0)  # per replica; 0: one per core
    cores: tuple[int, ...] = ()  # cores that its replicas may run on, by the kernel's numbers; empty: all


class EncodeArgs(_PoolArgs):
    max_batch_items: int = Field(default=64, ge=1)  # in one encoder call, whose fit decides up to here
    cache_bytes: int = Field(default=256 * MIB, ge=0)  # embeddings kept for media seen before
    # preprocessed media that wait for the encoder; room for a long video (Qwen2.5-VL: 19 KiB a row, 16,384
    # rows) and some images
    max_prepared_bytes: int = Field(default=512 * MIB, ge=1)
    # embedding rows that wait for the encoder; beyond this number new items are refused (429). A GPU that
    # makes 10,000 rows a second needs about `first_token_timeout_s` for so many: later items would only miss
    # that deadline
    max_queued_rows: int = Field(default=1 << 20, ge=1)
    # processes that run the model's processor beside the encoder; 0: two threads of the encoder's own process
    # do; None: a quarter of `threads`
    prepare_processes: int | None = Field(default=None, ge=0)

    @property
    def num_prepare_processes(self) -> int:
        return self.threads // 4 if self.prepare_processes is None else self.prepare_processes


class SchedulingArgs(_Args):
    """Which request goes first; see cluster/scheduling/keys.py."""

    # a request goes before requests of the next higher class that arrived this much later
    aging_s: float = Field(default=5.0, ge=0)
    tokens_per_s: float = Field(default=2000.0, gt=0)  # prompt tokens that weigh as much as a second's wait
    # share of prefill's steps and blocks for requests without media
    text_share: float = Field(default=0.3, ge=0, le=1)
    # seconds by which prompts may lengthen a step with answers: inter-token latency grows by no more
    prompt_pause_s: float = Field(default=0.05, gt=0)


HEAD_METHODS = ("mtp", "eagle3")  # heads that read the model's hidden rows


class SpeculationArgs(_Args):
    # ngram: prompt lookup; draft: a draft model; mtp: the checkpoint's own layer for multi-token prediction
    # eagle3: an EAGLE-3 head
    method: Literal["off", "ngram", "draft", "mtp", "eagle3"] = "off"
    num_speculative_tokens: int = Field(default=4, ge=1, le=32)  # at most, in one step of one choice
    # folder of the draft model, which has the same tokenizer, or of the EAGLE-3 head; or a hub id
    model: str = ""
    draft_kv_blocks: int = Field(default=1024, ge=2)  # of the draft model or the head


class _LanguageArgs(_PoolArgs):
    # of a GPU's memory, for all that a worker keeps there; what weights and embeddings leave is KV,
    # unless `kv_blocks` says how much. The rest is for CUDA itself and a draft model
    memory_share: float = Field(default=0.9, gt=0, le=1)


class PrefillArgs(_LanguageArgs):
    # for prompts in work and the prefix cache; None: on CPUs 2,048, on GPUs by `memory_share`
    kv_blocks: int | None = Field(default=None, ge=2)
    max_batch_tokens: int = Field(default=2048, ge=1)  # prompt tokens in one step, over all requests
    step_target_s: float = Field(default=0.5, gt=0)  # and no more than are expected to take this long
    feature_bytes: int = Field(default=128 * MIB, ge=0)  # memory that encoders write embeddings into


class DecodeArgs(_LanguageArgs):
    kv_blocks: int | None = Field(default=None, ge=2)  # for whole conversations; None: on CPUs 4,096
    # in one step; a request has one sequence per choice, with guidance two
    max_batch_sequences: int = Field(default=256, ge=1)
    speculation: SpeculationArgs = SpeculationArgs()


class CombinedArgs(_LanguageArgs):
    """Workers of several phases. They have the memory and the limits of each: those of `encode`, `prefill`
    and `decode`."""


class TransferArgs(_Args):
    """How KV travels from prefill to decode."""

    # raw: exactly as computed
    # int8, int4: half or a quarter of the bytes, a little less exact; int4 only if a probe of the model
    # allows it
    # auto: int8 if that is predicted to arrive sooner, else raw
    codec: Literal["raw", "int8", "int4", "auto"] = "raw"
    # tokens that may travel coded at once, per worker; others travel raw
    wire_tokens: int = Field(default=16_384, ge=64)
    # auto: decode computes the end of a prompt itself if its KV would arrive later over a slow link
    recompute: Literal["never", "auto"] = "never"
    # network devices of a private network between the hosts, by UCX's names ("eth1", "mlx5_0:1"). NIXL
    # listens there, and everything that reaches it may write into the workers' memory. Needed with
    # side_channel: tcp; on one host NIXL uses loopback only
    net_devices: tuple[str, ...] = ()

    @property
    def codecs(self) -> tuple[Literal["raw", "int8", "int4"], ...]:
        """The codecs in which KV may travel; a coded one, if there is one, is the last."""
        return ("raw", "int8") if self.codec == "auto" else (self.codec,)


class KvCacheArgs(_Args):
    """A second tier for the KV of each prefill, decode and language worker; docs/workers.md. Blocks that the
    worker's own memory loses go to host memory, and from there to disk."""

    host_bytes: int = Field(default=0, ge=0)  # 0: none
    disk_bytes: int = Field(default=0, ge=0)  # 0: none
    disk_folder: str = "~/.cache/epdg/kv"  # of this user alone


class FetchArgs(_Args):
    """The URLs from which the door reads media; cluster/media/fetch/policy.py says how hosts are written."""

    allowed_hosts: tuple[str, ...] = ()  # empty: any public host
    denied_hosts: tuple[str, ...] = ()
    # trusted: may use http and have any address; every client may read from all of them
    internal_hosts: tuple[str, ...] = ()
    total_timeout_s: float = Field(default=30.0, gt=0)  # for one item
    cache_bytes: int = Field(default=256 * MIB, ge=0)  # of fetched files, as long as their hosts allow it
    max_concurrent: int = Field(default=32, ge=1)  # simultaneous downloads


class MediaArgs(_Args):
    fetch: FetchArgs = FetchArgs()
    max_items: int = Field(default=64, ge=1)  # per request
    # of one request's files; equal files count once; beyond it 413
    max_request_bytes: int = Field(default=256 * MIB, ge=1)
    # of all requests in work at a door, half of it for one tenant; beyond it 429
    max_held_bytes: int = Field(default=2048 * MIB, ge=1)
    # of all items of a request; 0: as many as the model's context has room for
    max_tokens: int = Field(default=0, ge=0)
    # rows that encoders compute, before pooling: for one image (its rows attend to each other), and for all
    # items of a request
    max_picture_rows: int = Field(default=16_384, ge=1)
    max_rows: int = Field(default=65_536, ge=1)
    # When the shortest encoder queue has this many embedding rows, new media is reduced: the longer the queue
    # the more, down to a quarter of its tokens. The answer says so. 0: never
    reduce_from_queued_rows: int = Field(default=0, ge=0)


class AdmissionClassArgs(_Args):
    """Requests of the same importance."""

    name: str
    # highest priority number in this class; None: all that no earlier class takes
    max_priority: int | None = None
    # at the door; a request that would wait longer is refused at once
    max_wait_s: float = Field(default=60.0, gt=0)
    # a request that would miss it is refused at once; 0: no target
    target_ttft_s: float = Field(default=0.0, ge=0)
    weight: float = Field(default=1.0, gt=0)  # share of the work while several classes wait


class AdmissionArgs(_Args):
    """Which requests enter the cluster, wait at the door, or are refused (429); see docs/admission.md."""

    # the most important class first; the last one is refused first
    classes: tuple[AdmissionClassArgs, ...] = (
        AdmissionClassArgs(name="interactive", max_priority=0, weight=8.0),
        AdmissionClassArgs(name="batch", max_wait_s=300.0),
    )
    # predicted work in the cluster per worker of a pool; further requests wait at the door. Two of prefill's
    # steps: less would leave workers idle, more would make urgent requests wait for work that cannot be
    # recalled
    max_outstanding_s: float = Field(default=1.0, gt=0)
    max_queued: int = Field(default=1024, ge=1)  # requests that wait at this door, which holds their media
    # doors that share the cluster evenly, each admitting its part; 1: a door takes all that load reports say
    # is free
    num_doors: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check_classes(self) -> AdmissionArgs:
        names = [each.name for each in self.classes]
        *bounds, last = [each.max_priority for each in self.classes] or [0]
        given = [bound for bound in bounds if bound is not None]
        if last is not None or len(given) < len(bounds) or given != sorted(set(given)):
            raise ValueError("max_priority must grow from class to class, and the last class has none")
        if len(set(names)) < len(names):
            raise ValueError("two classes have one name")
        return self


Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]


class AccessArgs(_Args):
    """Which clients may call the API; docs/api.md."""

    # list of the API keys, YAML or JSON, read again when it changes; cluster/config/keys.py says what it has.
    # Empty: no key is needed, unless the environment has one
    key_file: str = ""
    public_metrics: bool = False  # /metrics needs no key even if there are keys
    # of web pages that may call the API, as "https://app.example"; "*": all
    cors_origins: tuple[Origin, ...] = ()


POLICY = r"^(joint|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"


class DoorArgs(_Args):
    request_timeout_s: float = Field(default=600.0, gt=0)  # a request's whole life
    first_token_timeout_s: float = Field(default=120.0, gt=0)  # until the first token, once it was let in
    # how requests are placed. joint: all workers of a request together, for the earliest first token. Any
    # other value is the import path of a policy, package.module:Class
    policy: str = Field(default="joint", pattern=POLICY)
    # of an OpenTelemetry collector, such as http://localhost:4318/v1/traces; empty: no traces
    otlp_traces_endpoint: str = ""
    # the most urgent priority that a client may ask for; lower is more urgent
    min_priority: int = Field(default=0, ge=-8, le=0)
    # tenants share KV and embeddings, and can therefore find out what others have sent
    share_caches: bool = False
    show_workers: bool = False  # to clients that ask for a request's timeline
    # of all requests in work; beyond it requests are refused (429)
    held_body_bytes: int = Field(default=1 << 30, ge=1)
    # how long a background response can be read after its end. 0, or several doors: `background` is refused
    keep_responses_s: float = Field(default=600.0, ge=0)
    # how the model writes calls of tools and reasoning: a file of cluster/text/formats, without `.json`.
    # Empty: what the checkpoint says, or what its chat template shows
    answer_format: str = ""
    access: AccessArgs = AccessArgs()
    # what /v1/audio/transcriptions asks the model to do with a sound
    transcription_instruction: str = Field(default="Transcribe the audio.", min_length=1)
    # what /v1/audio/translations asks it to do; without one there is no such endpoint
    translation_instruction: str = ""
    media: MediaArgs = MediaArgs()
    admission: AdmissionArgs = AdmissionArgs()

    @property
    def response_lifetime_s(self) -> float:
        """0 where several doors answer: another one would not find a response."""
        return self.keep_responses_s if self.admission.num_doors == 1 else 0.0


class WeightCacheArgs(_Args):
    """Packed weights that the workers of a host share and later starts map; docs/operations.md. CPU only."""

    folder: str = "~/.cache/epdg/weights"  # of this user alone
    # of all files; the one unused for the longest time goes first. 0: every worker packs for itself
    max_bytes: int = Field(default=16 << 30, ge=0)

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()


class ClusterArgs(_Args):
    # folder, relative to the working directory or else to the repository; or a hub id, "org/name"
    model: str = "deploy/demo_model"
    model_id: str = ""  # the name clients use; empty: the folder's name, or the hub id
    max_model_len: int = Field(default=0, ge=0)  # tokens of prompt and answer; 0: the model's own
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    # auto: the dtype; int8: half the bytes of 16 bit, a little less exact
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    # of the language half's linears; int8: CPU only, less exact
    weight_dtype: Literal["auto", "int8"] = "auto"
    # LoRA adapters: the name that clients give as `model`, and a folder as PEFT writes it, found as `model`
    # is
    adapters: dict[Annotated[str, Field(min_length=1, max_length=256)], str] = {}
    max_lora_rank: int = Field(default=64, ge=1)  # an adapter with a larger one is refused
    # adapters in it may be loaded and unloaded while the cluster runs; empty: none. The same on every host
    adapters_folder: str = ""
    max_loras: int = Field(default=4, ge=1)  # at once, with `adapters_folder`: each has room in memory
    # GPUs of each prefill and decode replica, which share the model
    tensor_parallel_size: int = Field(default=1, ge=1)
    # each of these GPUs holds whole experts, instead of a part of every expert
    expert_parallel: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if the replica finds it
    # compiled variant of CPU kernels and KV codecs; auto: the best that the processor runs; none: torch
    cpu_kernels: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "none"] = "auto"
    # auto: Triton's where they can run; none: torch's, which are slower, where one of ours breaks a GPU
    gpu_kernels: Literal["auto", "none"] = "auto"
    block_size: int = Field(default=16, ge=1)  # tokens in one KV block
    transport: Literal["nixl", "collective"] = "nixl"  # collective: Gloo, NCCL
    side_channel: Literal["unix", "tcp"] = "unix"  # tcp: pools on several hosts
    # a worker is replaced if its engine or transfer thread has work and has not moved for so long; any single
    # layer takes less
    hang_timeout_s: float = Field(default=60.0, gt=0)
    # the deployments of the cluster, which workers they have: encode, prefill, decode; language (prefill and
    # decode); encode_prefill; whole (all three). Replica counts stand in `deployments`
    roles: tuple[Role, ...] = (Role.ENCODE, Role.PREFILL, Role.DECODE)
    encode: EncodeArgs = EncodeArgs()
    prefill: PrefillArgs = PrefillArgs()
    decode: DecodeArgs = DecodeArgs()
    language: CombinedArgs = CombinedArgs()
    encode_prefill: CombinedArgs = CombinedArgs()
    whole: CombinedArgs = CombinedArgs()
    transfer: TransferArgs = TransferArgs()
    kv_cache: KvCacheArgs = KvCacheArgs()
    door: DoorArgs = DoorArgs()
    scheduling: SchedulingArgs = SchedulingArgs()
    weight_cache: WeightCacheArgs = WeightCacheArgs()

    @model_validator(mode="after")
    def _check_network(self) -> ClusterArgs:
        if self.side_channel == "tcp" and self.transport == "nixl" and not self.transfer.net_devices:
            raise ValueError(
                "side_channel: tcp needs transfer.net_devices, the network devices that NIXL may use between "
                'hosts (as "eth1" '
                'or "mlx5_0:1"): of a private network, because NIXL does not authenticate what writes there'
            )
        return self

    @model_validator(mode="after")
    def _check_roles(self) -> ClusterArgs:
        if len(set(self.roles)) < len(self.roles):
            raise ValueError("roles names a deployment twice")
        for phase in (Phase.PREFILL, Phase.DECODE):
            able = [role for role in Role if phase in role.phases]
            if not set(able).intersection(self.roles):
                raise ValueError(f"roles: no worker would {phase}; add one of {', '.join(able)}")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> ClusterArgs:
        method = self.decode.speculation.method
        needs_one = {
            "kv_cache.host_bytes and disk_bytes need": self.kv_cache.host_bytes or self.kv_cache.disk_bytes,
            f"decode.speculation.method {method} needs": method in HEAD_METHODS,
        }
        for what, is_wanted in needs_one.items():
            if is_wanted and self.tensor_parallel_size > 1:
                raise ValueError(f"{what} tensor_parallel_size 1")
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expert_parallel divides experts over the GPUs of tensor_parallel_size: it is 1")
        return self

    @property
    def pools(self) -> dict[str, EncodeArgs | PrefillArgs | DecodeArgs | CombinedArgs]:
        """Where the workers of each role run."""
        return {role.value: getattr(self, role.value) for role in Role}

    @property
    def cpu_kv_blocks(self) -> dict[Phase, int]:
        """KV blocks of a CPU worker for each of its phases."""
        return {Phase.PREFILL: self.prefill.kv_blocks or 2048, Phase.DECODE: self.decode.kv_blocks or 4096}

    @property
    def net_devices(self) -> tuple[str, ...]:
        """The devices that a worker's NIXL agent may listen on."""
        return self.transfer.net_devices if self.side_channel == "tcp" else ("lo",)
