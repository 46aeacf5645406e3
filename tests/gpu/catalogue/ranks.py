"""One rank of case D2: ``python -m catalogue.ranks LANE`` with RANK, WORLD_SIZE, MASTER_*.

As tensor-parallel serving has it: each rank multiplies its half of K, an all-reduce adds the two,
the sum is the input of nothing else; eight such layers are captured in one graph, which is
replayed while eager calls of changing M, also with all-reduces, run between the replays. Prints
one JSON line.
"""

from __future__ import annotations

import json
import os
import sys

LAYERS = 8
ROUNDS = 100


def main() -> None:
    sys.stdout.flush()
    line = os.dup(1)
    os.dup2(2, 1)
    import torch
    import torch.distributed as dist

    from .memory import Others
    from .ops import Call, runtime

    lane, rank = sys.argv[1], int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    calls = [
        Call(lane, (1, 64, 512, 32768), seed=100 * rank + layer, device=device)
        for layer in range(LAYERS)
    ]
    prefills = [
        Call(lane, (1, m, 1024, 8192), seed=100 * rank + m, device=device)
        for m in (3, 17, 100, 257, 1000)
    ]

    def layer(call: Call) -> None:
        call()
        dist.all_reduce(call.out)

    def references(of: list[Call]) -> list[torch.Tensor]:
        made = []
        for call in of:
            layer(call)
            torch.cuda.synchronize()
            made.append(call.out.clone())
        return made

    wanted, wanted_prefills = references(calls), references(prefills)
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        for call in calls:
            layer(call)
    others = Others(8, device=device)
    wrong = 0
    for number in range(ROUNDS):
        for call in calls:
            call.out.zero_()
        graph.replay()
        which = number % len(prefills)
        layer(prefills[which])
        torch.cuda.synchronize()
        wrong += not torch.equal(prefills[which].out, wanted_prefills[which])
        wrong += sum(
            not torch.equal(call.out, want) for call, want in zip(calls, wanted, strict=True)
        )
    overwritten = others.overwritten()
    figures: dict[str, object] = {
        "wrong of": f"{wrong} of {ROUNDS * (LAYERS + 1)}",
        "bytes of others overwritten": overwritten,
    }
    fine = wrong == 0 and overwritten == 0
    fork = runtime()
    if fork is not None:
        places = sorted({each["device"] for each in fork.stats()["lanes"]})
        figures["lanes on"] = ", ".join(places)
        fine = fine and places == [f"cuda:{rank}"]
    dist.barrier()
    os.write(line, (json.dumps({"passed": fine, **figures}) + "\n").encode())
    sys.stderr.flush()
    os._exit(0)  # NCCL and graphs are alive: their teardown is not this case's


if __name__ == "__main__":
    main()
