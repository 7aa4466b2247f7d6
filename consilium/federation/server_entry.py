"""The one class that a job may name at the server; this module holds nothing else that can be called."""

from __future__ import annotations

from consilium.federation.server_job import ServerJob

__all__ = ["ServerJob"]
