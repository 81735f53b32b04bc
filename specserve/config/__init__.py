"""Settings: declared once (settings.py), read from sources (sources.py), resolved by copy (resolve.py)."""

from specserve.config.paths import resolve_paths
from specserve.config.resolve import resolve
from specserve.config.settings import SETTINGS, Settings
from specserve.config.sources import load_settings, make_settings, unused
