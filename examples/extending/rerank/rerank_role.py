"""A role from outside of Baton: workers that score documents for a query, by the cosine of their vectors.

The entry point of docs/extending.md names KIND. It imports neither a router nor a worker: each loads its own side.
"""

from engine_protocol.roles import ClientService, RoleKind

ROLE = "rerank"

KIND = RoleKind(
    ROLE,
    service="example.rerank.v1.ScoreService",
    stage="STAGE_EMBED",
    engine="embedder",
    worker="rerank_worker:open_service",
    completes=True,
    client_services=(ClientService("example.rerank.v1.RerankService", "rerank_router:service"),),
)
