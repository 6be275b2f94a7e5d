"""Job configuration: one frozen dataclass per section. Read from TOML and flags by config_file, checked by plan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.groups.rank_grid import AXES, DEFAULT_ORDER

DEFAULT_BUCKET_NUMEL = 200_000  # a small model still gets several buckets, so that there is something to overlap


@dataclass(frozen=True)
class ModelOptions:
    """The GPT."""

    num_layers: int = 4  # transformer layers
    hidden_size: int = 128  # numbers of a token between layers
    num_attention_heads: int = 4  # query heads; they share hidden_size
    num_query_groups: int | None = None  # key/value heads; None for as many as query heads
    ffn_hidden_size: int | None = None  # None for 4 x hidden_size (8/3 x, rounded up to 64, under swiglu)
    sequence_length: int = 256  # tokens in one training window
    # the norm before attention, before the MLP, and at the end
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    activation: Literal["gelu", "swiglu"] = "gelu"  # activation of the MLP
    # added to the token embedding, or rotated into queries and keys
    position_embedding_type: Literal["learned_absolute", "rope"] = "rope"
    qk_layernorm: bool = False  # normalize queries and keys of each head
    add_bias_linear: bool = False  # biases in linear layers
    share_embeddings_and_output_weights: bool = True  # one weight for the token embedding and the output
    # compute layers again in backward, or the parts of recompute_modules
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_num_layers: int | None = None  # the first layers of each stage that are recomputed; None for all
    # parts for 'selective': core_attn, mlp, mlp_act, layernorm, moe, moe_act, shared_experts
    recompute_modules: tuple[str, ...] = ("core_attn",)
    # tokens whose logits are computed at a time, and again in backward; 0 for all; None: by the size of the logits
    logits_chunk: int | None = None
    hidden_dropout: float = 0.0  # dropout after the embedding, attention and the MLP
    attention_dropout: float = 0.0  # dropout of attention's weights
    init_method_std: float = 0.02  # standard deviation of the initial weights
    gradient_accumulation_fusion: bool = False  # weight gradients are added to the buffer by the product itself
    # dtype of the parameters; the optimizer keeps fp32 copies of 16-bit ones, and scales the loss of float16
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    vocab_size: int | None = None  # rows of the embedding; None for the tokenizer's vocabulary

    num_experts: int | None = None  # experts of a layer that has some; None for a model without
    moe_layer_freq: int = 2  # one layer in so many has experts, beginning with the first
    moe_router_topk: int = 2  # experts a token goes to
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"  # how logits become an expert's weight
    moe_router_pre_softmax: bool = False  # softmax over all experts, before the best are chosen
    moe_router_enable_expert_bias: bool = False  # balance by a bias of each expert in the choice, without a loss
    # per sequence, so that a step does not depend on how a batch is cut into microbatches and data ranks
    moe_router_load_balancing_type: Literal["seq_aux_loss", "aux_loss", "global_aux_loss", "none"] = "seq_aux_loss"
    moe_aux_loss_coeff: float = 1e-2  # weight of the balancing loss
    moe_z_loss_coeff: float | None = None  # weight of the loss that keeps router logits small; None for none
    moe_expert_capacity_factor: float | None = None  # times an even share that an expert takes; None drops no token
    moe_ffn_hidden_size: int | None = None  # width of one expert; None for that of a dense layer / moe_router_topk
    moe_shared_expert_intermediate_size: int | None = None  # width of an expert for all tokens; None for none
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"  # how tokens come to their experts
    moe_grouped_gemm: bool = False  # one product for the experts of a rank

    @property
    def ffn_width(self) -> int:
        """ffn_hidden_size, or its default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return (self.hidden_size * 8 // 3 + 63) // 64 * 64
        return 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """moe_ffn_hidden_size, or its default: a token's experts together are as wide as a dense layer."""
        if self.moe_ffn_hidden_size is not None:
            return self.moe_ffn_hidden_size
        return max(1, self.ffn_width // max(1, self.moe_router_topk))

    @property
    def query_groups(self) -> int:
        """num_query_groups, or its default."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups


@dataclass(frozen=True)
class ParallelOptions:
    """Sizes of the parallel axes; the remaining ranks are data parallel."""

    dp: int | None = None  # None for what the other axes leave; a number is compared with that
    tp: int = 2  # tensor parallel: ranks that share each layer
    sequence_parallel: bool | None = None  # None means wherever tp is larger than 1
    pp: int = 1  # pipeline parallel: stages of consecutive layers
    vpp: int = 1  # stages of a pipeline that one rank holds
    # schedule of a pipeline, in core.pipeline_parallel.SCHEDULES; None for 1F1B, or Interleaved1F1B over several stages
    # a rank
    schedule: str | None = None
    layers_per_stage: tuple[int, ...] = ()  # empty for as many on every stage
    cp: int = 1  # ranks that share each sequence
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"  # how they see each other's keys and values
    ep: int = 1  # ranks that share the experts of a layer
    etp: int | None = None  # ranks that share one expert; None for tp
    order: str = DEFAULT_ORDER  # axes from the smallest stride to the largest
    timeout_minutes: int = 30  # the longest that a collective may take

    @property
    def uses_sequence_parallel(self) -> bool:
        """sequence_parallel, or its default."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def schedule_name(self) -> str:
        """schedule, or its default."""
        if self.schedule is not None:
            return self.schedule
        several = self.vpp > 1 or len(self.layers_per_stage) > self.pp
        return "Interleaved1F1B" if several else "1F1B"


# The options that are the size of an axis.
AXIS_OPTIONS = tuple(f.name for f in fields(ParallelOptions) if f.name in {axis.label for axis in AXES})


@dataclass(frozen=True)
class OptimizerOptions:
    """The update and its learning rate: linear warm-up to lr, then a cosine down to min_lr at the last step."""

    name: Literal["adam", "sgd", "lion", "muon"] = "adam"  # the update's rule
    lr: float = 2e-3  # the highest learning rate
    min_lr: float = 2e-4  # the learning rate at the last step
    warmup_steps: int = 20  # steps in which the rate grows to lr
    decay: Literal["cosine", "linear", "constant"] = "cosine"  # how the rate falls from lr to min_lr
    weight_decay: float = 0.01  # decay of weights, not of biases and norms
    adam_beta1: float = 0.9  # how slowly the mean of gradients moves
    adam_beta2: float = 0.95  # how slowly the mean of their squares moves
    adam_eps: float = 1e-8  # added to the root of the squares
    sgd_momentum: float = 0.9  # momentum of sgd
    clip_grad: float = 1.0  # the largest norm over all gradients; 0 clips nothing
    loss_scale: float | None = None  # a constant factor; None for a dynamic one with float16, else for none
    initial_loss_scale: float = 2.0**16  # the first dynamic factor
    loss_scale_window: int = 1000  # steps without an overflow after which the factor is doubled


@dataclass(frozen=True)
class DataOptions:
    """Source of the text, and its tokenizer."""

    # files, or directories searched for *.txt, *.md and *.py; empty for the source of the Python standard library
    text: tuple[Path, ...] = ()
    megatron: Path | None = None  # NAME of Megatron's NAME.bin and NAME.idx: tokens that are made already
    # for the package `datasets`: a directory of save_to_disk, a kind of file (json, csv, parquet, text) whose files are
    # in --data.text, or a name on the hub
    dataset: str | None = None
    split: str = "train"  # split of the data set
    column: str = "text"  # column of the data set's rows that is the text
    documents: int | None = None  # the first so many rows of the data set; None for all
    streaming: bool = False  # read the data set row by row, without a copy of it on disk
    # 'bytes', 'bpe' (trained on the text), or the path of a tokenizers JSON file; of Megatron's tokens it is only kept
    tokenizer: str = "bytes"
    bpe_vocab_size: int = 4096  # words of the tokenizer 'bpe'
    validation_fraction: float = 0.02  # the share of the text, at its end, that is never trained on
    cache: Path = Path("runs/tokens")  # directory of the token files; one is made for each text and tokenizer


@dataclass(frozen=True)
class RunOptions:
    """Length of the run, batch sizes, device and directory."""

    name: str = "default"  # name of the run's directory
    directory: Path = Path("runs")  # directory that holds the directories of runs
    steps: int = 150  # steps of the whole schedule
    stop_after: int | None = None  # end after this many steps of it
    global_batch_size: int = 16  # windows in one optimizer step, in any layout
    micro_batch_size: int | None = None  # windows in one forward of one rank; None for all that the rank has
    validation_windows: int = 128  # windows that a validation loss is taken over
    validate_every: int = 50  # steps between validation losses; 0 takes the one at the end only
    seed: int = 1234  # decides the weights, the order of the data, and dropout
    ranks: int = 4  # processes to start when no launcher (torchrun, SLURM) has started this one
    threads_per_rank: int | None = None  # None for OMP_NUM_THREADS where the user set it, else cores / local ranks
    # 'auto' is CUDA where every local rank has a device of its own, else CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    check_memory: bool = True  # reject a job whose plan needs far more memory than is here

    @property
    def last_step(self) -> int:
        """The number of steps this run takes."""
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of saving checkpoints, their content, and resuming."""

    dir: Path | None = None  # a directory that all ranks share; None is for what at_end says
    # without a dir: save in the directory of a run on one machine when it ends or is asked to stop
    at_end: bool = True
    every: int | None = None  # steps between saves; None saves only when the run ends or is asked to stop
    keep: int | None = None  # checkpoints that stay, the newest; None keeps all
    # keep the one with the lowest validation loss too, in the folder `best`
    keep_best: bool = False
    asynchronous: bool = False  # write while training continues
    resume: bool = False  # continue from the newest intact checkpoint in dir; if there is none, begin
    step: int | None = None  # continue from this one, and no other
    # the learning rate's schedule after resuming; 'same' rejects one that is not the saved
    schedule: Literal["same", "saved", "given"] = "same"


@dataclass(frozen=True)
class LoggingOptions:
    """Output in addition to steps.jsonl."""

    print_every: int = 10  # steps between printed lines
    # programs that get each step's numbers too, in the order given
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    profile: bool = False  # write what torch's profiler sees of steps 3 to 5 on rank 0, with the names of their parts
    # TFLOP/s of one device, for the MFU in the step line; None for a table of devices, and no MFU where it has none
    peak_tflops: float | None = None
    # record each so many-th step, for `python -m core compare`; None records none
    record_every: int | None = None
    trace: bool = False  # draw what every rank did in the last step
    plots: bool = True  # draw the loss and the time line of the last step


@dataclass(frozen=True)
class RunConfig:
    """Sections that all jobs share."""

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)


@dataclass(frozen=True)
class JobConfig(RunConfig):
    """Configuration of the main job."""

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    ddp: DistributedDataParallelConfig = field(
        default_factory=lambda: DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            check_for_nan_in_grad=True,
            bucket_size=DEFAULT_BUCKET_NUMEL,
        )
    )
    data: DataOptions = field(default_factory=DataOptions)
