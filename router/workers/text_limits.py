"""The limits on the texts of large requests, before they are parsed: longer ones fit no model that is served."""

from google.protobuf.descriptor import Descriptor

from baton.inference.v1 import embed_pb2, media_pb2
from baton.kserve import inference_pb2
from router.workers.cluster import Cluster
from rpc.interceptors.counting import TextLimits

# For what a request has beside its input: its names, stop strings, and a grammar.
_OTHER_CHARACTERS = 512 * 1024
_URI_BYTES = 4096  # of a URI that is not its content
_MEDIA = frozenset(f"{media_pb2.MediaItem.DESCRIPTOR.full_name}.{name}" for name in ("data", "uri"))
_EMBEDS = frozenset({embed_pb2.EmbedRequest.DESCRIPTOR, inference_pb2.ModelInferRequest.DESCRIPTOR})


class LongestTexts:
    """Says how long the texts of requests may be, by the models of a cluster as they are now."""

    def __init__(self, cluster: Cluster, max_embed_inputs: int, max_media_bytes: int) -> None:
        self._cluster = cluster
        self._max_embed_inputs = max_embed_inputs
        self._media_bytes = max_media_bytes * 4 // 3 + _URI_BYTES  # in a URI it is base64

    def limits(self, message: Descriptor | None = None, *, embeds: bool = False) -> TextLimits | None:
        """The limits of a request, which is for embeddings if its message can be. None if no model is known yet.

        Called in any thread.
        """
        models = [worker.model for worker in self._cluster.workers if worker.model is not None]
        if not models:
            return None
        each = together = max(
            model.limits.max_context_tokens * model.tokenizer.longest_token if model.tokenizer else 0
            for model in models
        )
        if embeds or message in _EMBEDS:
            inputs = [
                model.embedding.max_input_tokens * model.tokenizer.longest_token
                for model in models
                if model.embedding and model.tokenizer
            ]
            each = max(each, *inputs, 0)
            together = max(together, *(self._max_embed_inputs * one for one in inputs), 0)
        takes_media = any(model.capabilities.modalities for model in models)
        return TextLimits(
            each + _OTHER_CHARACTERS,
            together + _OTHER_CHARACTERS,
            _MEDIA if takes_media else frozenset(),
            self._media_bytes,
        )
