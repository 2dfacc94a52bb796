"""Every setting of the server: its name, type, default and meaning, in one frozen dataclass.

The same names are flags of ``lorimer serve``, keys of the TOML file and, in capitals after ``LORIMER_``, environment
variables. ``setting_sources.py`` reads them from there; ``docs/configuration.md`` is made from this module.
"""

import ipaddress
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec

from lorimer.engine.config import Device, Dtype, EngineConfig, Quantize, VllmConfig, split_quantize
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.store.objects import check_url
from lorimer.types.settings import Setting

Durability = Literal["process", "power"]
LogFormat = Literal["auto", "pretty", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Role = Literal["all", "api", "worker"]
StartEngines = Literal["auto", "eager", "lazy"]
MetricsAccess = Literal["loopback", "key", "open"]
Downloads = Literal["signed", "streamed"]
Cluster = Literal["none", "ray"]
Trainings = Literal["auto", "on", "off"]
TrainingGraders = Literal["refused", "allowed"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

KIB, MIB = 1024, 1024 * 1024
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:+@-]{0,255}")


def default_data_directory() -> Path:
    """Where facts live unless the user says otherwise: the XDG data directory of this user."""
    home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".local" / "share") / "lorimer"


DEFAULT_MODELS = ("lorimer/tiny",)


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[model."NAME"]`` of the TOML file: what differs for one base model. None takes the server's value."""

    source: str = ""
    """The directory, .gguf file or hub id; empty takes the name, or what ``models`` says."""
    replicas: int = 1
    ranks: int = 1
    """Processes of each replica, which share the base and every batch."""
    device: Device | None = None
    dtype: Dtype | None = None
    quantize: Quantize | None = None
    """Format of the projections of the frozen base; None takes what ``models`` says."""
    num_threads: int | None = None
    memory_bytes: int | None = None
    max_context: int | None = None
    token_budget: int | None = None
    max_sampling_rows: int | None = None
    sampler: VllmConfig | None = None
    """None samples with the engine only."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; at least 1 is accepted")
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; at least 1 is accepted")


@dataclass(frozen=True, kw_only=True)
class Settings(SchedulerLimits):
    """The configuration of a server, constant while it runs.

    Fields whose default is that of `SchedulerLimits` are described there, and repeated for their place on the page.
    """

    # What is served, and where
    models: Annotated[
        tuple[str, ...],
        Setting(
            "Base models: names, directories or .gguf files; NAME=SOURCE serves SOURCE as NAME, and MODEL,quantize=int8"
            " (or int4, nf4) keeps the base in 8 or 4 bits."
        ),
    ] = DEFAULT_MODELS
    model: Annotated[
        dict[str, ModelSettings],
        Setting('Tables of the TOML file, [model."NAME"], with what differs for one base model; see below.'),
    ] = field(default_factory=dict)
    host: Annotated[str, Setting("Address to listen on; any other than loopback needs keys.")] = "127.0.0.1"
    port: Annotated[int, Setting("Port to listen on; 0 takes a free one.", 0)] = 8000
    data: Annotated[Path, Setting("Directory of the database, the weights and the snapshots.")] = field(
        default_factory=default_data_directory
    )
    database: Annotated[str, Setting("URL of a PostgreSQL database; empty takes SQLite in the data directory.")] = ""
    objects: Annotated[
        str,
        Setting(
            "Where weights, snapshots and large payloads are stored: s3://BUCKET/PREFIX, or file:///DIRECTORY; empty"
            " takes the data directory. Endpoint and credentials come from the AWS variables."
        ),
    ] = ""
    scratch_bytes: Annotated[
        int,
        Setting("Most bytes of local copies in the data directory of what an object store has; the oldest go.", MIB),
    ] = 64 * 1024 * MIB
    downloads: Annotated[
        Downloads,
        Setting("Whether clients get signed URLs of the object store, if it has them, or download from the server."),
    ] = "signed"
    start_engines: Annotated[
        StartEngines,
        Setting("When base models are loaded: eager at start, lazy on first use; auto is eager for one model."),
    ] = "auto"
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting("Names, besides the address and loopback, that a request's Host may have; *.example.org and * work."),
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        Setting("Addresses or networks of proxies: a request's address is then the one their X-Forwarded-For names."),
    ] = ()
    metrics_access: Annotated[MetricsAccess, Setting("Who may read /metrics without a key.")] = "loopback"
    otlp_endpoint: Annotated[
        str,
        Setting(
            "URL of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318, for a trace of each"
            " request; empty sends none. Needs the extra otel."
        ),
    ] = ""
    log_format: Annotated[LogFormat, Setting("Shape of the log; auto is pretty on a terminal and JSON elsewhere.")] = (
        "auto"
    )
    log_level: Annotated[
        LogLevel, Setting("Least severe message that is logged; debug has polls and heartbeats too.")
    ] = "info"

    # Several processes
    role: Annotated[
        Role,
        Setting(
            "all serves and computes in one installation of one process; api only serves, and needs a PostgreSQL"
            " database and workers (`lorimer worker`, whose role is worker)."
        ),
    ] = "all"
    secret_file: Annotated[
        str, Setting("File of the secret that signs tokens and links; the same for all processes. Empty makes one.")
    ] = ""
    node: Annotated[str, Setting("Name of this machine, for people; empty takes the host name.")] = ""
    worker_replicas: Annotated[int, Setting("Most replicas that one worker computes; 0 is no limit.", 0)] = 0
    worker_claims: Annotated[
        tuple[str, ...],
        Setting("Names of the replicas that a worker may compute, such as Qwen/Qwen3-8B#0 or *#sampler-*; empty: any."),
    ] = ()
    worker_host: Annotated[
        str, Setting("Address of a worker at which API replicas reach it for streams and cancellations.")
    ] = "127.0.0.1"
    worker_port: Annotated[int, Setting("Its port; 0 takes a free one.", 0)] = 0
    worker_metrics_port: Annotated[
        int, Setting("Port, at the same address, of a worker's /metrics and /api/v1/healthz; 0 serves none.", 0)
    ] = 0
    lease_seconds: Annotated[
        float, Setting("A worker that was not heard of for this long is replaced: its replicas are taken over.", 0.5)
    ] = 10.0
    cluster: Annotated[
        Cluster,
        Setting("Who starts workers: none is you, systemd or Kubernetes; ray is `lorimer cluster start`."),
    ] = "none"

    # The engine of each base model
    device: Annotated[Device, Setting("Where base models run.")] = "auto"
    dtype: Annotated[Dtype, Setting("Precision of passes and of the frozen base; auto is chosen by a short probe.")] = (
        "auto"
    )
    num_threads: Annotated[int, Setting("CPU threads of each engine; 0 takes all cores.", 0)] = 0
    memory_bytes: Annotated[
        int, Setting("Memory of each engine besides the base weights; 0 takes 70 % of what is free.", 0)
    ] = 0
    max_context: Annotated[int, Setting("Longest sequence in tokens; 0 takes the model's own limit.", 0)] = 0
    token_budget: Annotated[int, Setting("Most tokens of one training pass; 0 finds it from memory.", 0)] = 0
    max_sampling_rows: Annotated[int, Setting("Most sequences decoded in one step.", 1)] = 256
    cache_directory: Annotated[
        str, Setting("Where converted and downloaded models are kept; empty takes the user's cache.")
    ] = ""
    peft_adapters: Annotated[
        str, Setting("A directory of PEFT adapters, a folder each, with which runs may begin (`init_from`).")
    ] = ""

    # Trainings that the server starts
    trainings: Annotated[
        Trainings,
        Setting(
            "Whether users may start trainings in processes of this server (/api/v1/trainings); auto is on for a server"
            " on loopback without keys."
        ),
    ] = "auto"
    training_graders: Annotated[
        TrainingGraders,
        Setting("Whether such trainings may name a grader, which is code that then runs as the user of the server."),
    ] = "refused"
    max_trainings: Annotated[int, Setting("Most of them concurrently.", 1)] = 2
    max_trainings_per_user: Annotated[int, Setting("Most of one user concurrently.", 1)] = 1
    training_memory_bytes: Annotated[
        int,
        Setting("Most memory of one of their processes, on Linux; 0 is half of the machine's, -1 sets no limit.", -1),
    ] = 0
    max_training_data_bytes: Annotated[
        int, Setting("Most bytes of the rows that one of them, or a check of data, is given.", KIB)
    ] = 32 * MIB
    data_check_seconds: Annotated[float, Setting("A check of data that takes longer is given up (503).", 1)] = 120.0

    # Limits of one request
    max_body_bytes: Annotated[int, Setting("Most bytes of a request body as sent.", KIB)] = 64 * MIB
    max_decompressed_bytes: Annotated[int, Setting("Most bytes of a request body after decompression.", KIB)] = (
        256 * MIB
    )
    max_small_body_bytes: Annotated[
        int,
        Setting("Most bytes after decompression of bodies that hold no training data, prompts, chats or metrics.", KIB),
    ] = MIB
    max_chat_bytes: Annotated[
        int,
        Setting("Most bytes after decompression of an OpenAI or Anthropic request, images included.", KIB),
    ] = 32 * MIB
    body_seconds: Annotated[float, Setting("Longest time a request body may take to arrive.", 0.1)] = 120.0
    # The HTTP server has one time for both. Clients beat every ten seconds, which should find their connection open.
    header_seconds: Annotated[
        float,
        Setting("Longest time the headers of a request may take to arrive, and an idle connection stays open.", 0.1),
    ] = 15.0
    answer_seconds: Annotated[
        float, Setting("A connection whose client takes nothing of its answer for this long is cut (on Linux).", 0.1)
    ] = 60.0
    max_json_depth: Annotated[int, Setting("Deepest nesting of lists and objects in a JSON body.", 4)] = 64
    max_json_values: Annotated[
        int, Setting("Most values in the JSON of such a small body; lists and objects: a tenth of them.", 100)
    ] = 50_000
    max_string_chars: Annotated[int, Setting("Longest text of a field that is not a prompt, in characters.", 64)] = 8192
    max_metadata_bytes: Annotated[int, Setting("Most bytes of user_metadata or tags, as JSON.", 64)] = 64 * KIB
    max_datums_per_operation: Annotated[int, Setting("Most datums of one forward or forward_backward.", 1)] = 4096
    max_tokens_per_datum: Annotated[int, Setting("Most tokens of one datum or prompt.", 1)] = 131_072
    max_tokens_per_operation: Annotated[int, Setting("Most tokens of all datums of one operation.", 1)] = 4_194_304
    max_images_per_datum: Annotated[int, Setting("Most images of one datum or prompt.", 0)] = 64
    max_image_bytes: Annotated[int, Setting("Most bytes of one image file.", 1)] = 20 * MIB
    max_image_pixels: Annotated[int, Setting("Most pixels of one image; a larger one is not decoded.", 1)] = 2**24
    max_samples_per_request: Annotated[int, Setting("Most sequences of one sample request.", 1)] = 1024
    max_sample_tokens: Annotated[int, Setting("Most new tokens of one sequence (max_tokens).", 1)] = 131_072
    max_stop_sequences: Annotated[int, Setting("Most stop sequences of one sample request.", 1)] = 64
    max_stop_chars: Annotated[int, Setting("Longest stop sequence, in characters or tokens.", 1)] = 1024
    max_custom_loss_bytes: Annotated[int, Setting("Largest graph of a custom loss, as sent.", KIB)] = MIB
    max_metric_values_per_request: Annotated[int, Setting("Most values of one report of a run's metrics.", 1)] = 10_000
    max_rollouts_per_request: Annotated[int, Setting("Most rollouts of one report.", 1)] = 256
    max_rollout_bytes: Annotated[int, Setting("Most bytes of one rollout, as JSON.", KIB)] = MIB
    max_telemetry_events: Annotated[int, Setting("Most telemetry events of one request.", 1)] = 1000
    compress_bytes: Annotated[int, Setting("Answers of at least this size are compressed for clients that ask.", 1)] = (
        16 * KIB
    )

    # Limits of a user, and of all
    max_sessions_per_user: Annotated[
        int, Setting("Most sessions of one user that are unfinished and were heard of in the last ten minutes.", 1)
    ] = 10_000
    max_runs_per_session: int = SchedulerLimits.max_runs_per_session
    max_metric_names_per_run: Annotated[int, Setting("Most metrics that clients report to one run.", 1)] = 1000
    max_metric_values_per_run: Annotated[int, Setting("Most values of those, over all steps.", 1)] = 5_000_000
    max_rollouts_per_run: Annotated[
        int,
        Setting(
            "Most rollouts kept of one run; beyond them the newest steps stay whole and older ones are thinned.", 1
        ),
    ] = 10_000
    max_rollout_bytes_per_run: Annotated[
        int, Setting("Most bytes of those, as they are stored; beyond them older steps are thinned too.", KIB)
    ] = 256 * MIB
    max_episodes_per_run: Annotated[
        int, Setting("Most episodes of programs outside that one run has; more are answered 429.", 1)
    ] = 100_000
    max_episode_bytes_per_run: Annotated[
        int, Setting("Most bytes of their tokens and logprobs; then no turn is begun until some are deleted.", 1)
    ] = 4096 * MIB
    max_turns_per_episode: Annotated[int, Setting("Most requests of one episode.", 1)] = 1000
    max_stored_bytes: int = SchedulerLimits.max_stored_bytes
    requests_per_second: Annotated[
        float,
        Setting(
            "Quota: requests of a user per second, those of ten seconds in one burst; more are answered 429; polls,"
            " heartbeats and telemetry do not count; 0 is no limit.",
            0,
        ),
    ] = 0.0
    failed_lookups_per_second: Annotated[
        float,
        Setting(
            "Lookups per second of ids that the caller does not have, by user, and of wrong keys, by address; those of"
            " twenty seconds in one burst, more are answered 429, and valid ids and keys never; 0 is no limit.",
            0,
        ),
    ] = 10.0
    max_open_operations: int = SchedulerLimits.max_open_operations
    max_open_bytes: int = SchedulerLimits.max_open_bytes
    max_queued_samples: int = SchedulerLimits.max_queued_samples
    max_running_samples: int = SchedulerLimits.max_running_samples
    max_losses_per_session: int = SchedulerLimits.max_losses_per_session
    max_loaded_runs: int = SchedulerLimits.max_loaded_runs
    max_full_runs: int = SchedulerLimits.max_full_runs
    full_idle_seconds: float = SchedulerLimits.full_idle_seconds
    residence_seconds: float = SchedulerLimits.residence_seconds
    max_loaded_samplers: int = SchedulerLimits.max_loaded_samplers
    max_concurrent_requests: Annotated[
        int, Setting("Most requests held concurrently; users share them, and more are answered 429.", 1)
    ] = 20_000
    max_requests_per_address: Annotated[
        int, Setting("Most requests of one client address held concurrently; more are answered 429.", 1)
    ] = 10_000
    max_incoming_bytes: Annotated[
        int,
        Setting("Most bytes of request bodies that are arriving; users share them, and more are answered 429.", KIB),
    ] = 1024 * MIB
    max_decoding_bytes: Annotated[
        int, Setting("Most bytes of bodies that are being decompressed and decoded; more are answered 429.", KIB)
    ] = 1024 * MIB
    max_decoding_bytes_per_user: Annotated[
        int, Setting("Most of those bytes of one user; the oldest body has room in any case.", KIB)
    ] = 512 * MIB
    decoder_processes: Annotated[
        int, Setting("Processes that decode large bodies, started when there is one; a user leaves one to others.", 1)
    ] = 2
    decoder_seconds: Annotated[float, Setting("A body that takes longer to decode is given up (503).", 0.1)] = 60.0
    decoder_memory_bytes: Annotated[
        int, Setting("Most memory of a decoder; a body that needs more is refused (on Linux).", 128 * MIB)
    ] = 2048 * MIB
    turn_tokens: int = SchedulerLimits.turn_tokens
    recent_result_bytes: int = SchedulerLimits.recent_result_bytes

    # Time
    poll_seconds: Annotated[float, Setting("Longest time a poll for a result is held.", 0.0)] = 30.0
    gap_seconds: float = SchedulerLimits.gap_seconds
    stall_seconds: float = SchedulerLimits.stall_seconds
    max_engine_deaths: int = SchedulerLimits.max_engine_deaths
    heartbeat_flush_seconds: Annotated[float, Setting("Heartbeats are written together this often.", 0.05)] = 15.0
    sweep_seconds: Annotated[float, Setting("Expired results and checkpoints are removed this often.", 0.05)] = 60.0
    run_summary_seconds: Annotated[
        float,
        Setting(
            "Best and last values of runs' metrics are brought up to date this often; if that takes long, less often.",
            0.05,
        ),
    ] = 2.0
    system_sample_seconds: Annotated[
        float, Setting("CPU, memory, GPUs, disk, queues and throughput are sampled this often.", 0.05)
    ] = 5.0
    shutdown_seconds: Annotated[float, Setting("Longest wait for the running batch and snapshots at shutdown.", 0)] = (
        30.0
    )

    # Durability and retention
    durability: Annotated[
        Durability,
        Setting("What acknowledged requests survive: the death of any process, or also a loss of power (slower)."),
    ] = "process"
    snapshot_seconds: float = SchedulerLimits.snapshot_seconds
    result_seconds_after_fetch: float = SchedulerLimits.result_seconds_after_fetch
    result_seconds: float = SchedulerLimits.result_seconds
    history_seconds: float = SchedulerLimits.history_seconds
    ephemeral_samplers_per_run: int = SchedulerLimits.ephemeral_samplers_per_run
    sampler_idle_seconds: float = SchedulerLimits.sampler_idle_seconds
    ephemeral_seconds: float = SchedulerLimits.ephemeral_seconds
    run_seconds: float = SchedulerLimits.run_seconds
    episode_idle_seconds: float = SchedulerLimits.episode_idle_seconds
    episode_seconds: float = SchedulerLimits.episode_seconds
    download_seconds: Annotated[float, Setting("How long a signed download URL works.", 1)] = 3600.0

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if setting.minimum is not None and not setting.minimum <= value < float("inf"):  # nan is refused too
                raise ValueError(f"{name} is {value!r}; at least {setting.minimum:g} is accepted")
        if self.max_incoming_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"max_incoming_bytes is {self.max_incoming_bytes!r}; at least {2 * self.max_body_bytes}, twice"
                " max_body_bytes, is accepted: one user gets half of it"
            )
        if self.port > 65535:
            raise ValueError(f"port is {self.port!r}; 0 to 65535 is accepted")
        if self.database and not self.database.startswith(("postgresql", "sqlite")):
            raise ValueError(f"database is {redacted_url(self.database)!r}; a postgresql+psycopg:// URL is accepted")
        if self.role != "all" and not self.database.startswith("postgresql"):
            raise ValueError(
                f"role is {self.role!r}, which needs a PostgreSQL database: several processes cannot share a SQLite"
                " file; set database to postgresql://user@host/name, or leave the role at 'all'"
            )
        if self.cluster == "ray" and not self.database.startswith("postgresql"):
            raise ValueError(
                "cluster is 'ray', which needs a PostgreSQL database: workers on several machines cannot share a SQLite"
                " file; set database to postgresql://user@host/name"
            )
        check_url(self.objects)
        if not self.host:
            raise ValueError("host is empty; an address such as '127.0.0.1' is accepted")
        self.engine_configs()
        self.proxy_networks()

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def starts_eagerly(self) -> bool:
        return self.start_engines == "eager" or (self.start_engines == "auto" and len(self.engine_configs()) == 1)

    def engine_configs(self) -> dict[str, EngineConfig]:
        """The engine of each served name, in the order of ``models``."""
        sources: dict[str, str] = {}
        formats: dict[str, str] = {}
        for model in () if self.model and self.models == DEFAULT_MODELS else self.models:
            name, source, quantize = read_model(model)
            name = served_name(name)
            if name in sources:
                raise ValueError(f"models has {name!r} twice; NAME=SOURCE gives one of them another name")
            sources[name], formats[name] = source, quantize
        for model, table in self.model.items():
            name = served_name(model)
            sources[name] = table.source or sources.get(name, model)
            formats[name] = table.quantize or formats.get(name, "none")
        if not sources:
            raise ValueError("models is empty; name at least one base model, such as 'lorimer/tiny'")
        return {name: self._engine_config(name, source, formats[name]) for name, source in sources.items()}

    def serves(self, model: str) -> bool:
        """Whether there is an engine for what ``models`` would call ``model``: by name or source, in that format."""
        name, _, quantize = read_model(model)
        return any(
            name in (served, config.model) and quantize in ("none", config.quantize)
            for served, config in self.engine_configs().items()
        )

    def num_replicas(self) -> dict[str, int]:
        """The number of replicas of each base model that has a table."""
        return {served_name(name): table.replicas for name, table in self.model.items()}

    def proxy_networks(self) -> list[Network]:
        """``trusted_proxies``, read."""
        found: list[Network] = []
        for proxy in self.trusted_proxies:
            try:
                found.append(ipaddress.ip_network(proxy, strict=False))
            except ValueError:
                raise ValueError(
                    f"trusted_proxies has {proxy!r}; an address or a network such as '10.0.0.0/8' is accepted"
                ) from None
        return found

    def scheduler_limits(self) -> SchedulerLimits:
        """Return the settings of the scheduler."""
        return SchedulerLimits(**{item.name: getattr(self, item.name) for item in fields(SchedulerLimits)})

    def _engine_config(self, name: str, source: str, quantize: str) -> EngineConfig:
        """Return the settings of one engine: those that have the same name here, or in the model's table."""
        shared = {field: getattr(self, field) for field in ENGINE_SETTINGS}
        for model, table in self.model.items():
            if served_name(model) == name:
                own = {field: getattr(table, field) for field in ENGINE_SETTINGS if hasattr(table, field)}
                shared |= {field: value for field, value in own.items() if value is not None}
                shared["ranks"] = table.ranks
                shared["vllm"] = table.sampler
        return EngineConfig(model=source, quantize=cast("Quantize", quantize), **shared)


def read_model(model: str) -> tuple[str, str, str]:
    """Return name, source and format of ``[NAME=]SOURCE[,quantize=FORMAT]``."""
    model, quantize = split_quantize(model)
    name, _, source = model.rpartition("=") if "=" in model else (model, "", model)
    return name, source, quantize


def served_name(name: str) -> str:
    """What clients call a model: a path is known by its last part, anything else by itself."""
    is_path = name.startswith((".", "/", "~")) or name.endswith(".gguf")
    served = Path(name).expanduser().resolve().name if is_path else name
    if not MODEL_NAME.fullmatch(served):
        raise ValueError(f"models has {name!r}; letters, digits and . _ / : + @ - are accepted, or NAME=SOURCE")
    return served


def redacted_url(url: str) -> str:
    """A database URL without its password."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


_HINTS = get_type_hints(Settings)
TYPES: dict[str, Any] = {name: _HINTS[name] for name in Settings.__annotations__}
"""The type of each setting, in the order of the documents."""
_ANNOTATED = get_type_hints(Settings, include_extras=True) | get_type_hints(SchedulerLimits, include_extras=True)
ENGINE_SETTINGS = [name for name in EngineConfig.__struct_fields__ if name in TYPES and name != "model"]
"""The settings of an engine that have the same name here."""
SETTINGS: dict[str, Setting] = {name: _ANNOTATED[name].__metadata__[0] for name in TYPES}
