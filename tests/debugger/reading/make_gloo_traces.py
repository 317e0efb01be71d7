"""Makes data/gloo-rank-N.json.gz: traces of four gloo ranks, tp2 pp2, that communicate as Fourfold's trainer does.

    OMP_NUM_THREADS=1 .venv/bin/python tests/debugger/reading/make_gloo_traces.py

The second stage's first rank, 2, sleeps 30 ms in every forward, between the start of a gather and the wait for it.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, record_function

from fourfold.layout import Label

DATA = Path(__file__).parent / "data"
STEPS, MICRO_BATCHES, SLEEP = (7, 8), 2, 0.03


def run(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "KINETO_LOG_LEVEL": "6"}
    dist.init_process_group("gloo", rank=rank, world_size=4)
    groups = {low: dist.new_group([low, low + 1], group_desc="mesh_tp") for low in (0, 2)}
    lows, stage = rank // 2 * 2, rank // 2
    tp, pp, sequence = groups[lows], rank % 2, 0
    x = torch.randn(128, 128)
    for _ in range(2):  # what is done for the first time takes longer
        dist.all_gather_into_tensor(torch.empty(256, 128), x @ x, group=tp)
        dist.send(x, rank + 2) if stage == 0 else dist.recv(x, rank - 2)
        dist.all_reduce(torch.zeros(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        about = {"format": 1, "grid": {"tp": 2, "cp": 1, "pp": 2, "dp": 1}, "shares": [0.4, 0.6], "host": "here",
                 "processor_ns": {"7": 1234, "8": 5678}}  # fmt: skip
        profiler.add_metadata_json("fourfold", json.dumps(about))
        for step in STEPS:
            with record_function(f"ProfilerStep#{step}"):
                with record_function("ff:load"):
                    time.sleep(0.002)
                for mb in range(MICRO_BATCHES):
                    with record_function(str(Label("pp", "F", pp, stage, mb, 2 * mb))):
                        if stage == 1:
                            with record_function(str(Label("pp", "WAIT_F", pp, stage, mb, 2 * mb + 1))):
                                dist.recv(x, rank - 2)
                        y = x @ x
                        out = torch.empty(256, 128)
                        with record_function(str(Label("tp", "all_gather", lows, stage, mb, sequence))):
                            work = dist.all_gather_into_tensor(out, y, group=tp, async_op=True)
                        if rank == 2:
                            time.sleep(SLEEP)
                        with record_function(str(Label("tp", "wait", lows, stage, mb, sequence))):
                            work.wait()
                        sequence += 1
                        out.relu()
                    if stage == 0:
                        with record_function(str(Label("pp", "SEND_F", pp, stage, mb, 2 * mb + 1))):
                            dist.send(y, rank + 2)
                with record_function(str(Label("world", "all_reduce", 0, -1, -1, step - STEPS[0]))):
                    dist.all_reduce(torch.zeros(1))
            with record_function("ff:gc"):
                time.sleep(0.001)
    plain = DATA / f"{rank}.json"
    profiler.export_chrome_trace(str(plain))
    (DATA / f"gloo-rank-{rank}.json.gz").write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(29544,), nprocs=4)
