"""A new axis is written in three files: a patch adds one to a copy of core, and four ranks train over it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# File -> (a line of it, what is written below). The axis splits the tokens of a data rank: xp.
ROW = {
    "core/groups/rank_grid.py": [
        (
            '    Axis("tp", "tp", "tp", "dense", "activations", "tensor_model_parallel_size"),\n',
            '    Axis("xp", "xp", "xp", "dense", "activations", "x_parallel_size"),\n',
        )
    ]
}
FACE = {
    "core/parallel_state.py": [
        ("    tensor_model_parallel_size: int = 1,\n", "    x_parallel_size: int = 1,\n"),
        ("        tp=tensor_model_parallel_size,\n", "        xp=x_parallel_size,\n"),
        (
            "# --- sizes and ranks ".ljust(120, "-") + "\n",
            '\n\nget_x_parallel_group = _group_getter("xp", "The ranks that split the tokens of a data rank.")\n',
        ),
    ]
}
RULE = {
    "core/distributed/contract/gradient_contract.py": [
        (
            "DEFAULT_RULES = (\n",
            '    _rule("x-parallel sum", "xp", "sum"),\n',
        )
    ]
}

JOB = '''
import multiprocessing, sys
import torch
import torch.distributed as dist
from core import parallel_state
from core.distributed import (
    DistributedDataParallel, DistributedDataParallelConfig, declare_gradient, finalize_model_grads
)
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1234))  # [tokens, hidden]


class Gather(torch.autograd.Function):
    """[tokens / xp, hidden] -> [tokens, hidden] on every rank; all of them compute the same loss from it."""

    @staticmethod
    def forward(context, part, group):
        context.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context, grad):
        return grad.chunk(dist.get_world_size(context.group))[dist.get_rank(context.group)], None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 36).reshape(6, 6).cos())
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, tokens, group=None):
        if group is None:
            hidden = tokens @ self.inner
        else:
            mine = tokens.chunk(dist.get_world_size(group))[dist.get_rank(group)]
            hidden = Gather.apply(mine @ self.inner, group)  # sees its own tokens: partial over xp
        return (hidden * self.scale).square().mean()  # sees all tokens: whole on every rank of xp


def reference():
    model = Model()
    model(BATCH).backward()
    norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
    return {name: param.grad for name, param in model.named_parameters()}, norm, model


def train(strategy):
    group = parallel_state.get_x_parallel_group()
    groups = parallel_state.get_process_groups()
    assert (groups.size("xp"), groups.size("dp"), groups.size("dp_cp"), groups.size("mp")) == (2, 2, 2, 2)
    assert groups.xp is group and groups.ranks("xp") == [[0, 1], [2, 3]][dist.get_rank() // 2]
    config = ModelParallelConfig()
    model = Model()
    declare_gradient(model.inner, partial_over=("xp",))
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    ddp = DistributedDataParallel(config, ddp_config, model)
    text = ddp.describe()
    assert "inner [6, 6]: sum over dp_cp / 2; sum over xp (x-parallel sum)" in text, text
    assert "scale [6]: sum over dp_cp / 2\\n" in text + "\\n", text
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.5), [ddp])
    ddp.zero_grad_buffer()
    ddp(BATCH.chunk(2)[groups.rank("dp")], group).backward()
    own = model.inner.main_grad.clone() if strategy == "no_shard" else None
    finalize_model_grads([ddp])
    grads, norm, whole = reference()
    if strategy == "no_shard":
        assert (own - grads["inner"]).norm() > 0.1 * grads["inner"].norm()  # of this rank alone
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, grads[name])
    _, found, _ = optimizer.step()
    torch.testing.assert_close(torch.tensor(found), norm, check_dtype=False)
    for name, param in whole.named_parameters():
        expected = param.detach() - grads[name] * (0.5 / norm)
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected)
        assert (grads[name] * (0.5 / norm)).abs().max() > 0.01


def refuse_other_copies():
    model = Model()
    if parallel_state.get_process_groups().rank("xp") == 1:
        model.scale.data += 1.0
    try:
        DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(initial_weights="check"), model)
    except Exception as error:
        assert "scale" in str(error) and "xp" in str(error), error
    else:
        raise AssertionError("copies over xp that differ were taken")


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(x_parallel_size=2)
    for strategy in ("no_shard", "optim", "optim_grads"):
        train(strategy)
    refuse_other_copies()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


fork = multiprocessing.get_context("fork")
workers = [fork.Process(target=run, args=(rank, sys.argv[1])) for rank in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join(100)
sys.exit(any(worker.exitcode != 0 for worker in workers))
'''


def patched_core(folder: Path, patch: dict[str, list[tuple[str, str]]]) -> None:
    shutil.copytree(ROOT / "core", folder / "core", ignore=shutil.ignore_patterns("__pycache__"))
    for name, additions in patch.items():
        text = (folder / name).read_text()
        for line, added in additions:
            assert text.count(line) == 1, (name, line)
            text = text.replace(line, line + added)
        (folder / name).write_text(text)


def train_over_the_axis(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(JOB)
    return subprocess.run(
        [sys.executable, "job.py", str(folder / "store")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_axis_of_three_files_has_groups_a_whole_gradient_the_right_divisor_and_norm(tmp_path):
    patch = ROW | FACE | RULE
    assert len(patch) == 3
    patched_core(tmp_path, patch)
    done = train_over_the_axis(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.nightly  # each takes as long as the whole
@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (ROW | FACE, "its gradient is partial over 'xp' (2 ranks) and no sync rule reduces it there"),
        (ROW | RULE, "unexpected keyword argument 'x_parallel_size'"),
    ],
    ids=["without its rule", "without its argument"],
)
def test_an_axis_that_lacks_one_of_the_files_is_refused(tmp_path, patch, message):
    patched_core(tmp_path, patch)
    done = train_over_the_axis(tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
