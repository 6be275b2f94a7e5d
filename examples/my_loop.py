import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

dist.init_process_group("gloo")  # "nccl" on GPUs
parallel_state.initialize_model_parallel()
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
model = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(50):
    inputs = torch.randn(32, 16, generator=data)  # other data on every rank
    model.zero_grad_buffer()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    finalize_model_grads([model])  # every gradient is whole now, on every rank
    optimizer.step()
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
