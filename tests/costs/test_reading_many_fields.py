"""The event loop's own part in the reading of a large request."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.calibration import here
from support.many_fields import TOO_MANY

from baton.inference.v1 import generate_pb2 as pb
from rpc.interceptors.reading import Reader, ReadLimits

MIB = 2**20
MOST = 65_536


@pytest.mark.parametrize("name", TOO_MANY)
def test_the_event_loop_does_not_read_a_large_request_itself(name: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        deserialize = Reader(ReadLimits(64 * MIB, MOST), threads).deserializer(pb.GenerateRequest.FromString)
        assert deserialize is not None
        seconds = []
        for _ in range(3):
            started = time.thread_time()
            deserialize(TOO_MANY[name])
            seconds.append(time.thread_time() - started)
        assert min(seconds) < here(0.005)
