"""Python imports this when a process of an odd site starts, because the folder is on its path."""

import os

from tests.federation import odd_site

odd_site.become(os.environ["CONSILIUM_ODD"])
