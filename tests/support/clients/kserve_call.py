"""Calls of KServe's ModelInfer without Triton's client, which cannot be in one process with our protos."""

from baton.kserve import inference_pb2 as pb
from router.kserve.service import NAME
from rpc.channels import open_channel


def text_request(*texts: str, model: str = "demo") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model)
    contents = made.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)]).contents
    contents.bytes_contents.extend(text.encode() for text in texts)
    return made


async def infer(address: str, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    async with open_channel(address) as channel:
        call = channel.unary_unary(
            f"/{NAME}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer: pb.ModelInferResponse = await call(request, timeout=60)
        return answer
