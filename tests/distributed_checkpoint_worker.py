"""One of two processes: `distributed_checkpoint_worker.py RANK STORE_FILE DIRECTORY`. Fails by an assertion."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from backstash import Stash
from distributed_worker import WIDTH, sharded


def step(model, optimizer, rank, between=lambda: None):
    """The gradients of one step; ``between`` forward and backward."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank))
    loss = model(x).square().mean()
    between()
    loss.backward()
    grads = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return grads


def state_of(model, optimizer):
    parts = zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
    return dict(parts)


def main():
    rank, store, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    saved = directory / "checkpoint"

    def prepared():
        model = sharded()
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = prepared()
    plain = [step(model, optimizer, rank) for _ in range(3)]

    model, optimizer = prepared()
    stash = Stash(disk=directory, min_bytes=0, inflight=0)
    stash.attach(model)

    def save():
        assert stash.stats().blocks > 0  # a graph is alive, and what it saved is on disk
        dcp.save(state_of(model, optimizer), checkpoint_id=saved)

    mine = [step(model, optimizer, rank), step(model, optimizer, rank, save)]
    assert stash.stats().written_bytes > 0
    try:
        dcp.save({"stash": stash}, checkpoint_id=directory / "refused")
    except CheckpointException as error:
        assert "a Stash cannot be pickled" in str(error)
    else:
        raise AssertionError("a checkpoint has a stash in it")

    model, optimizer = (
        prepared()
    )  # begun again from the checkpoint, which is of before the second step's end
    stash.attach(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    again = [step(model, optimizer, rank), step(model, optimizer, rank)]
    for true, found in zip([*plain, *plain[1:]], [*mine, again[1], *again], strict=True):
        assert all(map(torch.equal, true, found))
    dist.barrier()
    files = [path for path in saved.iterdir() if path.is_file()]
    assert files and not any(b"backstash" in path.read_bytes() for path in files)
    stash.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
