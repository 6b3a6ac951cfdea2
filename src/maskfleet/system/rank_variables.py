"""Environment variables through which whoever starts a rank tells it where the ranks meet.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

STORE_FILE = "MASKFLEET_STORE_FILE"  # file in a private folder, for ranks that share a host
STORE_SOCKET = "MASKFLEET_STORE_SOCKET"  # number of the listening socket that rank 0 inherited
ATTEMPT = "MASKFLEET_ATTEMPT"  # its number: ranks of different attempts never meet
HOSTS = "MASKFLEET_HOSTS"  # names of the hosts and how many ranks each has, in order, as JSON

COMPILED_CODE = "MASKFLEET_COMPILED_CODE"  # folder of compiled code that runs on other machines share


def hosts_value(hosts: Sequence[tuple[str, int]]) -> str:
    """The value of HOSTS for (name, number of ranks) of each host."""
    return json.dumps(list(hosts))


def named_rank(rank: int, env: Mapping[str, str]) -> str:
    """`rank 5 on node2`; without the host if HOSTS does not tell it."""
    first = 0
    for name, count in json.loads(env.get(HOSTS, "[]")):
        if rank < first + count:
            return f"rank {rank} on {name}"
        first += count
    return f"rank {rank}"
