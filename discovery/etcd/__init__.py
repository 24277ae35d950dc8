"""The registry in etcd, over its v3 API.

| module | subject |
|---|---|
| registry | `EtcdRegistry` |
| registration | a worker's record under a lease; small ids under a lease |
| watch | the workers of a namespace |
| client | the etcd calls, each with a deadline; one watch on one member |
| methods | the gRPC methods, the members of the cluster, authentication |
| config | the settings |

It has its own client: the published Python clients cannot be imported beside a current protobuf, or do not recover from
a lost lease or a restarted server.
"""

from discovery.etcd.config import EtcdConfig
from discovery.etcd.registry import EtcdRegistry

__all__ = ["EtcdConfig", "EtcdRegistry"]
