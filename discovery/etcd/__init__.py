"""The registry in etcd, over its v3 API on our own grpc.aio client.

The published Python clients cannot be imported beside a current protobuf, or give up after a lost lease or a restarted
server. So the few calls that discovery needs are spoken directly: gRPC asks only for method paths and field numbers.
"""

from discovery.etcd.config import EtcdConfig
from discovery.etcd.registry import EtcdRegistry

__all__ = ["EtcdConfig", "EtcdRegistry"]
