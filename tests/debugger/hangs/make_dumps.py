"""Makes the flight-recorder dumps in ``dumps/`` beside this file: four real gloo processes, tp2 dp2, that hang.

    python tests/debugger/hangs/make_dumps.py FOLDER

In each step a rank all-reduces twice over TP and once over DP, sends a message to the rank two further on, and in the
end all-reduces over the world. What goes wrong in the second step is the name of the case:

- ``skips``: rank 3 leaves out its fourth TP all-reduce.
- ``dies``: rank 0 ends itself before the fourth TP all-reduce, so it leaves no dump.
- ``other_call``: rank 2 gathers where rank 3 all-reduces.
- ``other_size``: rank 2 reduces half as much as rank 3.
- ``sleeps``: rank 1 is somewhere else before its DP all-reduce.
- ``no_message``: rank 0 never sends its second message, and goes on.
- ``ends_well``: nothing does.

Ranks write a pickle with stacks, ``skips`` JSON as well, 2 s after they have begun.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

CASES = ("skips", "dies", "other_call", "other_size", "sleeps", "no_message", "ends_well")
SECONDS = 2.0


def two_steps(case: str, rank: int, mesh: DeviceMesh, ended: threading.Event) -> None:
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    for step in range(2):
        for layer in range(2):
            at_fault = step == layer == 1
            if at_fault and case == "skips" and rank == 3:
                continue
            if at_fault and case == "dies" and rank == 0:
                os._exit(1)
            if at_fault and case == "other_call" and rank == 2:
                parts = [torch.zeros(8), torch.zeros(8)]
                dist.all_gather(parts, torch.ones(8), group=tp)
                continue
            half = at_fault and case == "other_size" and rank == 2
            dist.all_reduce(torch.ones(4 if half else 8, 4), group=tp)
        if step == 1 and case == "sleeps" and rank == 1:
            read_data()
        dist.all_reduce(torch.ones(16), group=dp)
        if rank < 2 and not (step == 1 and case == "no_message" and rank == 0):
            dist.send(torch.ones(4), rank + 2)
        if rank >= 2:
            dist.recv(torch.ones(4), rank - 2)
    dist.all_reduce(torch.ones(1))
    ended.set()


def read_data() -> None:
    time.sleep(60)


def run(rank: int, case: str, folder: Path, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ended = threading.Event()
    threading.Thread(target=two_steps, args=(case, rank, mesh, ended), daemon=True).start()
    ended.wait(SECONDS)
    time.sleep(0.5)
    target = folder / case
    (target / f"nccl_trace_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    if case == "skips":
        json_folder = folder / "skips_json"
        json_folder.mkdir(exist_ok=True)
        (json_folder / f"rank{rank}.json").write_bytes(_dump_fr_trace_json(True, False))
    os._exit(0)


def main(folder: Path) -> None:
    for case in CASES:
        (folder / case).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            ranks = [mp.Process(target=run, args=(rank, case, folder, f"{place}/store")) for rank in range(4)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()


if __name__ == "__main__":
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    main(Path(sys.argv[1]))
