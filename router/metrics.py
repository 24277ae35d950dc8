"""What a router tells of its requests: metrics for Prometheus, and fields for the one log line of each."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import Counter, Gauge, Histogram

from router import traces
from router.account import Account
from rpc.errors import BatonError
from rpc.tracing.span import current_span

REQUESTS = Counter("baton_router_requests_total", "Requests that have ended.", ["model", "outcome"])
RUNNING = Gauge("baton_router_running_requests", "Requests that are running.")
TOKENS = Counter("baton_router_tokens_total", "Tokens of ended requests.", ["model", "kind"])
RETRIES = Counter("baton_router_retries_total", "Attempts after a worker had failed a request.", ["stage"])
REFUSALS = Counter("baton_router_refusals_total", "Requests that were not let in to the workers.", ["reason"])
WAITING = Gauge("baton_router_waiting_requests", "Requests that wait until they are let in to the workers.")
QUEUE_SECONDS = Histogram(
    "baton_router_queue_seconds",
    "How long requests waited that were not let in at once.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
)
TTFT = Histogram(
    "baton_router_time_to_first_token_seconds",
    "From a request's arrival to its first token.",
    ["model"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


@contextmanager
def observe(request_id: str) -> Iterator[Account]:
    """Counts a request, and binds what became of it to the log line of its call."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
    account = Account(request_id)
    RUNNING.inc()
    try:
        yield account
        account.outcome = "OK"
    except BatonError as error:
        account.outcome = error.reason
        raise
    except Exception:
        account.outcome = BatonError.reason
        raise
    finally:
        RUNNING.dec()
        _publish(account)


def _publish(account: Account) -> None:
    traces.describe(account, current_span())
    REQUESTS.labels(account.model, account.outcome).inc()
    TOKENS.labels(account.model, "prompt").inc(account.prompt_tokens)
    TOKENS.labels(account.model, "completion").inc(len(account.token_ids))
    first_token_seconds = account.ledger.first_token_seconds
    if first_token_seconds is not None:
        TTFT.labels(account.model).observe(first_token_seconds)
    structlog.contextvars.bind_contextvars(
        model=account.model,
        outcome=account.outcome,
        prompt_tokens=account.prompt_tokens,
        completion_tokens=len(account.token_ids),
        ttft_seconds=first_token_seconds and round(first_token_seconds, 6),
        total_seconds=round(account.ledger.total_seconds, 6),
        migrations=account.migrations,
        prefill_worker_id=account.prefill_worker_id,
        decode_worker_id=account.decode_worker_id,
    )
