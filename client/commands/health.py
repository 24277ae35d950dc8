"""`baton health`: asks a router or a worker for its health, for health checks that cannot speak gRPC themselves."""

import argparse

from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.address import find_address
from client.credentials import find_credentials
from rpc.calls import unary
from rpc.channels import open_channel

CHECK_SECONDS = 2.0


async def run(arguments: argparse.Namespace) -> int:
    """Prints the status. Exit code 0 if it is SERVING, else 1; anybody may ask, so no token is sent."""
    address, credentials = find_address(arguments.address).value, find_credentials(arguments)
    async with open_channel(address, credentials.tls) as channel:
        request = health_pb2.HealthCheckRequest(service=arguments.service)
        answer = await unary(health_pb2_grpc.HealthStub(channel).Check(request, timeout=CHECK_SECONDS))
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
