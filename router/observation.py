"""What is noted of each request when it ends: its metrics, its span, and the fields of its one log line."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from router import traces
from router.account import Account
from router.meter import Meter
from rpc.errors import BatonError
from rpc.outcomes import OK
from rpc.tracing.span import current_span


@contextmanager
def observe(request_id: str, meter: Meter) -> Iterator[Account]:
    """Measures a request, and binds what became of it to the log line of its call."""
    structlog.contextvars.bind_contextvars(request_id=request_id)
    account = Account(request_id)
    meter.begin()
    try:
        yield account
        account.outcome = OK
    except BatonError as error:
        account.outcome = error.reason
        raise
    except Exception:
        account.outcome = BatonError.reason
        raise
    finally:
        meter.end(account)
        _tell(account)


def _tell(account: Account) -> None:
    traces.describe(account, current_span())
    first_token_seconds = account.ledger.first_token_seconds
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
