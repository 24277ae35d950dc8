"""The seconds that a process waits for its peers, in one table. Waits that deployments differ in are configuration.

`baton doctor --config` checks that the configured times are in order with these.
"""

# A call whose failure has a backstop, such as a release, whose lease expires by itself. Do not wait long for a hung
# peer.
BEST_EFFORT_SECONDS = 2.0
BEST_EFFORT_UNHEALTHY_SECONDS = 0.2

# CancelGeneration: for the workers' receipts.
ABORT_SECONDS = 5.0

# The answer to a renewal or a release. After that, running the prompt again is quicker than waiting for the lease.
LEASE_ANSWER_SECONDS = 2.0

# GetPool, of a worker whose pool is read for the first time.
GET_POOL_SECONDS = 5.0

# The KV of the largest prompts takes a second; a pull that takes this long has failed.
KV_TRANSFER_SECONDS = 60.0
EMBEDDING_TRANSFER_SECONDS = 30.0

# The least interval between a peer's pings on a connection: servers close connections that ping more often. It is half
# of the interval of Baton's own channels.
MIN_PING_SECONDS = 5.0

# How long a server waits for cancelled calls to clean up before it ends without them.
CLEANUP_SECONDS = 5.0
