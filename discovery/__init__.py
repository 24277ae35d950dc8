"""Worker discovery: workers register, routers watch. Routers that share quotas register beside them.

| module | subject |
|---|---|
| registry | the Protocols: `Registry`, `Registration`, `AllocatedId`; the registry's keys |
| record | `WorkerRecord`, and its JSON; zone, rack and host of a worker |
| config | the key `registry` |
| etcd/ | the registry in etcd |
| file/ | the registry in a shared folder |
| memory | the registry in memory |
| membership | the workers as a watcher sees them, through outages; the newest value for a slow reader |
| pairing | workers that cannot hand KV over to one another |
| renewal, backoff | records and ids under a lease; the first call; waits between attempts |
"""
