"""What is loaded and what comes of it: an item as a request holds it, and content that has been checked."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item of a request, not yet looked at.

    `path` is where it stands in the request, such as `media[0]`; errors name the fields below it. `source` is the
    content itself, or the URI it is to be had from. `mime_type` is what the client says it is; empty leaves that open.
    """

    path: str
    source: bytes | str
    mime_type: str = ""

    @property
    def source_field(self) -> str:
        """The field that errors about the content name: `media[0].data` or `media[0].uri`."""
        return f"{self.path}.uri" if isinstance(self.source, str) else f"{self.path}.data"

    @property
    def mime_type_field(self) -> str:
        """The field that errors about the declared type name."""
        return f"{self.path}.mime_type"


@dataclass(frozen=True, slots=True)
class Media:
    """An image that is whole, of an accepted type and within the limits.

    `content` is the file as it came, undecoded; `mime_type` is what it really is. Width and height are in pixels, as
    stored: an orientation in its EXIF is not applied. `digest` is the SHA-256 of the content, 32 bytes.
    """

    content: bytes
    mime_type: str
    width: int
    height: int
    digest: bytes
