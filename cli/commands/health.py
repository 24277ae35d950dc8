"""`baton health`: checks the health of a router or worker, for probes that do not speak gRPC."""

import argparse

from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.calls import unary
from baton.enum_names import value_name
from cli.address import find_address
from cli.connection import find_credentials
from rpc.channels import open_channel

CHECK_SECONDS = 2.0


async def run(arguments: argparse.Namespace) -> int:
    """Prints the status. Exit code 0 if it is SERVING, else 1. Sends no token: health checks need none."""
    address, credentials = find_address(arguments.address).value, find_credentials(arguments)
    async with open_channel(address, credentials.tls) as channel:
        request = health_pb2.HealthCheckRequest(service=arguments.service)
        answer = await unary(health_pb2_grpc.HealthStub(channel).Check(request, timeout=CHECK_SECONDS))
    print(value_name(health_pb2.HealthCheckResponse.ServingStatus, answer.status).upper())
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
