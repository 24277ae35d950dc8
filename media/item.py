"""A media item of a request, and the checked content of one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item of a request, not yet checked.

    `path` is its path in the request, such as `media[0]`; errors name the fields below it. `source` is the content, or
    its URI. `mime_type` is the type that the client declared; empty if it declared none.
    """

    path: str
    source: bytes | str
    mime_type: str = ""

    @property
    def source_field(self) -> str:
        """The field for errors about the content: `media[0].data` or `media[0].uri`."""
        return f"{self.path}.uri" if isinstance(self.source, str) else f"{self.path}.data"

    @property
    def mime_type_field(self) -> str:
        """The field for errors about the declared type."""
        return f"{self.path}.mime_type"


@dataclass(frozen=True, slots=True)
class CheckedMedia:
    """An image that is complete, of an accepted type and within the limits.

    `content` is the file as received, not decoded; `mime_type` is its actual type. Width and height are in pixels, as
    stored: an orientation in its EXIF is not applied. `digest` is the SHA-256 of the content, 32 bytes.
    """

    content: bytes
    mime_type: str
    width: int
    height: int
    digest: bytes
