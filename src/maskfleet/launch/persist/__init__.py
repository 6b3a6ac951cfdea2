"""Continues a run after a reboot of its hosts: a systemd user unit, or a line of the crontab."""
