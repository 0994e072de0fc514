"""A Ray cluster on this machine: prints its address, adds a node for each line that it reads."""

from __future__ import annotations

import sys

NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_log_monitor": False}
HEAD = {**NODE, "include_dashboard": False, "no_monitor": True}

if __name__ == "__main__":
    from ray.cluster_utils import Cluster  # not there where this is only collected

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.add_node(**NODE)
    cluster.shutdown()
