"""The one class that a job may name at a site; this module holds nothing else that can be called."""

from __future__ import annotations

from consilium.federation.site_job import SiteJob

__all__ = ["SiteJob"]
