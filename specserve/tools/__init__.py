"""Offline tools. They may import any module; no other module imports them."""
