"""The answer of GetServerInfo: a deployment's version, models, limits, engines and façades."""

from collections.abc import Mapping, Sequence

from google.protobuf.duration_pb2 import Duration

from baton.connection.settings import MAX_RECEIVE_BYTES
from baton.inference.v1 import lora_pb2, model_pb2, server_info_pb2
from baton.version import __version__
from engine_protocol.roles import roles
from router.config import RouterConfig
from router.text.served_model import ServedModel
from router.workers.cluster import Cluster
from router.workers.handle import WorkerHandle
from router.workers.loras import loras_of_model, named


class DeploymentOffer:
    """The offer of the router of `config`, as of now. `openai_address` is empty if OpenAI's API is not served."""

    def __init__(self, config: RouterConfig, cluster: Cluster, openai_address: str) -> None:
        self._config = config
        self._cluster = cluster
        self._openai_address = openai_address

    def message(self) -> server_info_pb2.GetServerInfoResponse:
        """The answer of GetServerInfo."""
        return server_info_pb2.GetServerInfoResponse(
            version=__version__,
            router_id=self._config.router_id,
            limits=self._limits(),
            models=[self._model(served) for served in self._cluster.models],
            facades=self._facades(),
            routing_policy=self._config.routing.policy,
        )

    def _limits(self) -> server_info_pb2.ServerLimits:
        limits, admission = self._config.limits, self._config.admission
        return server_info_pb2.ServerLimits(
            max_message_bytes=MAX_RECEIVE_BYTES,
            max_openai_body_bytes=self._config.openai.max_body_bytes if self._openai_address else 0,
            default_timeout=_duration(limits.request_timeout_seconds),
            max_timeout=_duration(limits.max_timeout_seconds),
            max_waiting_requests=admission.max_waiting,
            max_running_per_worker=admission.max_running_per_worker,
            max_answers=limits.max_answers,
            max_messages=limits.max_messages,
            max_tools=limits.max_tools,
            max_images=limits.max_images,
            max_stop_strings=limits.max_stop_strings,
            max_logit_biases=limits.max_logit_biases,
            max_embed_inputs=limits.max_embed_inputs,
            max_bad_words=limits.max_bad_words,
        )

    def _facades(self) -> list[server_info_pb2.Facade]:
        has_tls = self._config.tls.listen is not None
        facades = [server_info_pb2.Facade(name=name, has_tls=has_tls) for name in ("grpc", "kserve")]
        if self._openai_address:
            http_tls, address = self._config.openai.tls is not None, self._openai_address
            for name in ("openai", "anthropic"):
                facades.append(server_info_pb2.Facade(name=name, address=address, has_tls=http_tls))
        return facades

    def _model(self, served: ServedModel) -> server_info_pb2.ModelOffer:
        workers = [worker for worker in self._cluster.workers if worker.record.model == served.name]
        message = model_message(served, self._cluster)
        features = [*served.features]
        if message.HasField("embedding") and "embeddings" not in features:
            features.append("embeddings")
        if message.HasField("image_generation") and "pictures" not in features:
            features.append("pictures")
        return server_info_pb2.ModelOffer(
            model=message,
            block_tokens=0 if served.capabilities.embeddings_only else served.block_tokens,
            dtype=served.dtype,
            engines=sorted({worker.record.engine for worker in workers}),
            roles=sorted({role for worker in workers for role in worker.record.roles}),
            transports=sorted({name for worker in workers for name in worker.record.offers or ()}),
            features=features,
            engine_settings=_settings(workers),
        )


def model_messages(cluster: Cluster) -> list[model_pb2.Model]:
    """All models, each one before its adapters."""
    models: list[model_pb2.Model] = []
    for served in cluster.models:
        adapters = loras_of_model(cluster.workers, served.name)
        models += [model_message(served, cluster, adapter) for adapter in (None, *adapters.values())]
    return models


def model_message(
    served: ServedModel, cluster: Cluster, adapter: lora_pb2.LoraAdapter | None = None
) -> model_pb2.Model:
    """A model, or one of its adapters, with the number of its ready workers."""
    workers = [worker for worker in cluster.workers if worker.record.model == served.name]
    embedding = next((worker.model.embedding for worker in workers if worker.model and worker.model.embedding), None)
    drawing = next((worker.model.drawing for worker in workers if worker.model and worker.model.drawing), None)
    ready = [worker for worker in workers if not worker.problem]
    if adapter is not None:
        ready = [worker for worker in ready if worker.loras.can_use(adapter)]
    made = model_pb2.Model(
        name=named(served.name, adapter),
        parent=served.name if adapter else "",
        lora=adapter,
        limits=served.limits,
        capabilities=served.capabilities,
        embedding=embedding,
        image_generation=drawing,
    )
    for role in roles():
        made.workers[role] = count = sum(role in worker.record.roles for worker in ready)
        if (field := f"{role}_workers") in model_pb2.Model.DESCRIPTOR.fields_by_name:
            setattr(made, field, count)
    return made


def _settings(workers: Sequence[WorkerHandle]) -> Mapping[str, str]:
    """Each setting with the values that it has on these workers."""
    found: dict[str, set[str]] = {}
    for worker in workers:
        for name, value in (worker.model.engine_settings if worker.model else {}).items():
            found.setdefault(name, set()).add(value)
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
